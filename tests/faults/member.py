"""One rank of a cluster, or the bootstrap node, as a real process: what fault tests and benchmarks drive.

Started by nursery.py. Its model is plain tensors that it moves by seeded amounts instead of training them;
all else is what a rank of `dilocox-peer join` is made of: node, service, company, lead, rounds, history.
Commands come in as JSON lines, events go out as JSON lines; it ends with its standard input, and is killed
with whoever started it.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from p2p_dilocox.averaging.coded import StageLayouts, codec_thread
from p2p_dilocox.averaging.company import Company, Progress
from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.exchange import Traffic
from p2p_dilocox.averaging.joining import make_plan
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome
from p2p_dilocox.averaging.round import Rounds
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.states import StateShelf
from p2p_dilocox.history import History
from p2p_dilocox.lineage import genesis
from p2p_dilocox.outer import OuterState
from p2p_dilocox.runspec import RunSpec, parse_run
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey, ensure_libp2p_identity
from p2p_dilocox.swarm.loop import NetworkThread
from p2p_dilocox.swarm.messages import RankAddress, unpack
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.signed import SignedRun, sign_run, spec_digest

from .hostile import become
from .nursery import serve as serve_nursery

__all__ = ["Config", "Member", "shapes_of"]

WEIGHT_CAP = 1000.0  # tokens that a cluster can have trained in an outer step
_NETWORK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """state: a directory for keys and history. stages: those this rank holds; no stages: the bootstrap node.
    Every stage has `matrices` [side, side] and a vector [side]. seed: of this cluster's pseudo-gradients."""

    text: str
    state: str
    host: str = "127.0.0.1"
    organiser: str = ""  # hex; with `signed` and `peers` what the bootstrap node printed
    signed: str = ""
    peers: list[str] = field(default_factory=list)
    rank: int = 0
    stages: list[int] = field(default_factory=list)
    matrices: int = 1
    side: int = 64
    seed: int = 0


def shapes_of(config: Config, stage: int) -> dict[str, tuple[int, ...]]:
    side = config.side
    matrices = {f"layers.{stage}.{i}.weight": (side, side) for i in range(config.matrices)}
    return {**matrices, f"layers.{stage}.norm.weight": (side,)}


def say(event: str, /, **values: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class Meter(Traffic):
    """Traffic that tells `moved` after every change: from here a fault strikes at an exact byte."""

    moved: Callable[[], None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("sent", "received") and self.moved is not None:
            self.moved()


class Member:
    """One rank of one cluster."""

    def __init__(self, config: Config, network: NetworkThread) -> None:
        self.config, self.network = config, network
        self.spec: RunSpec = parse_run(config.text)
        state = Path(config.state)
        self.key = SigningKey.load_or_create(state / "cluster.key")
        ensure_libp2p_identity(state / f"rank{config.rank}.key")
        self.node = network.call(
            Node.start(
                run_id=self.spec.run.id, organiser=bytes.fromhex(config.organiser),
                initial_peers=config.peers, host_maddrs=[f"/ip4/{config.host}/tcp/0"],
                identity_path=state / f"rank{config.rank}.key",
            ),
            _NETWORK_S,
        )  # fmt: skip
        self.names = {s: list(shapes_of(config, s)) for s in config.stages}
        self.parameters = self._start_parameters()
        digest = spec_digest(config.text)
        self.outer = OuterState(self.spec, self.parameters, frozenset(), genesis(digest))
        self.progress = Progress(lineage=self.outer.lineage, state="training")
        self.timeouts = Timeouts(self.spec.deadlines.round_s)
        self.codec = codec_thread()
        self.layouts = {s: StageLayouts(self.outer, self.names[s], frozenset(), 2) for s in config.stages}
        self.kept = KeptRounds(state / "rounds", lead=config.rank == 0)
        self.service = Service(
            self.node,
            Gate(self.key, self.spec.run.id, self.node.peer_id, self.spec.run.members),
            patience_s=self.timeouts.round_s,
            average_of=self.kept.average_of,
            piece_of=StateShelf(state / "checkpoints").piece,
        )
        self.meter = Meter()
        self.service.traffic = self.meter
        self.address = RankAddress(
            peer=self.node.peer_id, maddrs=network.call(self.node.maddrs(), _NETWORK_S),
            stages=list(config.stages),
        )  # fmt: skip
        self.lead: Lead | None = None
        self.rounds: Rounds
        self.history = History(
            state / f"rank{config.rank}.jsonl", self.spec.run.id, self.key.cluster_id, config.stages,
            self.timeouts.round_s,
        )  # fmt: skip

    def enter(self, ranks: list[str]) -> None:
        """ranks: the packed addresses of all ranks of our cluster, the lead's first."""
        addresses = [unpack(bytes.fromhex(r), RankAddress) for r in ranks]
        if self.config.rank == 0:
            company = Company(
                node=self.node, service=self.service, key=self.key, name="member", ranks=addresses,
                signed=SignedRun.from_bytes(bytes.fromhex(self.config.signed)), timeouts=self.timeouts,
                progress=self.progress, weight_cap=WEIGHT_CAP,
            )  # fmt: skip
            self.lead = Lead(
                company, spec_digest=spec_digest(self.config.text), num_stages=self.spec.model.stages,
                min_clusters=self.spec.run.min_clusters,
                quorum=self.spec.run.quorum,
                result_after=self.kept.result_after,
                offer=StateShelf(Path(self.config.state) / "checkpoints").offer,
            )  # fmt: skip
            self.service.desk = self.lead
        self.rounds = Rounds(
            loop=self.network.loop, service=self.service, outer=self.outer, layouts=self.layouts,
            me=self.key.cluster_id, lead=self.lead, lead_peer=addresses[0].peer, progress=self.progress,
            timeouts=self.timeouts, weight_cap=WEIGHT_CAP, codec=self.codec, kept=self.kept,
        )  # fmt: skip
        for address in addresses:
            if address.peer != self.node.peer_id:
                self.network.call(self.node.connect(address.peer, address.maddrs), _NETWORK_S)
        self.network.call(self.service.start([a.peer for a in addresses]), _NETWORK_S)
        if self.lead is not None:
            self.network.call(self.lead.company.start(), _NETWORK_S)

    def refresh(self) -> None:
        """What the next heartbeat would do."""
        if self.lead is not None:
            self.network.call(self.lead.company.refresh(), _NETWORK_S)

    def round(self, t: int, weight: float = 100.0, strike: dict[str, Any] | None = None) -> None:
        """Move the parameters, start the round of outer step t, wait for its outcome and apply it.

        strike: {"percent": of this rank's bytes, "signal": name}: what p2pd and this process then get; with
            "alone": true p2pd does not.
        """
        self._move(t)
        self.outer.contribute(self.parameters)
        norm = math.sqrt(sum(float(r.double().square().sum()) for r in self.outer.residual.values()))
        self._watch_bytes(t, strike)
        say("started", t=t)
        began = time.monotonic()
        outcome = self.rounds.start(t, Offer(weight, norm)).wait(lambda: False)
        assert outcome is not None
        if not outcome.failed:  # a real cluster would start again and fetch its state: see `catch_up`
            self._apply(outcome)
        self.meter.moved = None
        self._tell(outcome, time.monotonic() - began)

    def catch_up(self) -> None:
        """Follow the rounds of clusters that are further, as a cluster does that joins or has failed."""
        assert self.lead is not None
        while True:
            plan = self.network.call(make_plan(self.lead.company, 1), _NETWORK_S)
            if plan.action != "follow":
                return
            (donor,) = plan.donors.values()
            outcome = self.rounds.adopt(plan.results, donor, _NETWORK_S).wait(lambda: False)
            assert outcome is not None and not outcome.failed, outcome
            self._apply(outcome)

    def leave(self) -> None:
        if self.lead is not None:
            self.network.call(self.lead.close(), _NETWORK_S)

    def predicted_bytes(self, members: int) -> float:
        """What a rank sends and receives, each, in a round: the coded size times 2 (D - 1) / D in all, or
        (D - 1) times where few send all to all."""
        coded = [layouts.at(1).coded_bytes() for layouts in self.layouts.values()]
        if members <= self.spec.compression.gather_up_to:
            return float(sum((members - 1) * c.contribution for c in coded))
        return sum((members - 1) / members * (c.contribution + c.average) for c in coded)

    def _apply(self, outcome: Outcome) -> None:
        """As trainer.take_outer_step."""
        last = outcome.steps[-1] if outcome.steps else None
        if last is not None and last.own is not None:
            self.outer.commit(last.average, last.own)
        elif any(self.key.cluster_id in step.members for step in outcome.steps):
            self.outer.forget_undelivered()
        if last is not None:
            with self.outer.restart_(self.parameters, self.spec.overlap.keep):
                for step in outcome.steps:
                    self.outer.step(step.average, step.t, step.members, step.digest)
        self.progress.move_to(max(outcome.t, self.outer.t), self.outer)
        self.history.write(outcome, self.outer.lineage)

    def _tell(self, outcome: Outcome, elapsed: float) -> None:
        finite = all(bool(torch.isfinite(a).all()) for a in self.outer.anchor.values())
        say(
            "outcome", t=outcome.t, at=self.progress.t,
            steps=[{"t": s.t, "members": s.members} for s in outcome.steps],
            included=bool(outcome.steps) and outcome.steps[-1].own is not None, reason=outcome.reason,
            notes=outcome.notes, failed=outcome.failed, attempts=outcome.attempts, seconds=outcome.seconds,
            elapsed=elapsed, sent=outcome.sent_bytes, received=outcome.received_bytes, finite=finite,
            lineage=self.outer.lineage,
            predicted=self.predicted_bytes(len(outcome.steps[-1].members) if outcome.steps else 1),
        )  # fmt: skip

    def digests(self) -> dict[int, str]:
        return {s: self.outer.digest(names) for s, names in self.names.items()}

    def _watch_bytes(self, t: int, strike: dict[str, Any] | None) -> None:
        before, said = self.meter.sent + self.meter.received, -1

        def moved() -> None:
            nonlocal said, strike
            total = self._bytes_to_move()
            percent = int(100 * (self.meter.sent + self.meter.received - before) / max(1, total))
            if strike is not None and percent >= strike["percent"]:
                say("struck", t=t, percent=percent, signal=strike["signal"])
                blow, strike = strike, None
                _strike(signal.Signals[blow["signal"]], alone=blow.get("alone", False))
            elif percent > said:
                said = percent
                say("moved", t=t, percent=percent)

        self.meter.moved = moved

    def _bytes_to_move(self) -> int:
        """Sent and received by this rank in the attempt that is on the wire; parts differ in size."""
        group, total = self.spec.compression.group, 0
        for future in list(self.service._exchanges.values()):
            for phase in future.result()._phases if future.done() and not future.cancelled() else ():
                others = [m for m in phase.members if m != phase.me]
                there = [p for m in others for p in (*phase.outgoing(m), *phase.incoming(m))]
                back = [p for m in others for p in (*phase.returned(m), *phase.returned(phase.me))]
                total += sum(piece.there(group) for piece in there)
                total += sum(piece.back(group) for piece in back)
        return total

    @torch.no_grad()
    def _move(self, t: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.config.seed + t)
        for p in self.parameters.values():
            p.sub_(torch.randn(p.shape, generator=generator), alpha=0.01)

    def _start_parameters(self) -> dict[str, Tensor]:
        """The same in every cluster."""
        made = {}
        for stage in self.config.stages:
            generator = torch.Generator().manual_seed(stage)
            for name, shape in shapes_of(self.config, stage).items():
                made[name] = torch.randn(shape, generator=generator)
        return made


def _strike(number: signal.Signals, *, alone: bool) -> None:
    """Die or freeze at this very byte, as a whole or, alone, without p2pd."""
    for children in () if alone else Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)
    os.kill(os.getpid(), number)


def _commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def serve_bootstrap(config: Config, network: NetworkThread) -> None:
    key = SigningKey.generate()
    spec = parse_run(config.text)
    node = network.call(
        Node.start(run_id=spec.run.id, organiser=key.public, host_maddrs=[f"/ip4/{config.host}/tcp/0"]),
        _NETWORK_S,
    )
    signed = sign_run(key, spec.run.id, config.text)
    network.call(node.publish_run(signed), _NETWORK_S)
    peers = network.call(node.maddrs(), _NETWORK_S)
    say("link", organiser=key.public.hex(), signed=signed.pack().hex(), peers=peers)
    for _ in _commands():
        pass


def serve_member(config: Config, network: NetworkThread) -> None:
    member = Member(config, network)
    say(
        "address", packed=member.address.pack().hex(), cluster=member.key.cluster_id, peer=member.address.peer
    )
    for command in _commands():
        match command.pop("do"):
            case "enter":
                member.enter(command["ranks"])
                say("entered")
            case "refresh":
                member.refresh()
                say("refreshed")
            case "catch_up":
                member.catch_up()
                say("caught_up", t=member.outer.t)
            case "become":
                become(command["offence"], member)
                say("became")
            case "round":
                member.round(**command)
            case "digests":
                say("digests", digests=member.digests(), t=member.outer.t, lineage=member.outer.lineage)
            case "leave":
                member.leave()
                say("left")


def be(argument: str) -> None:
    torch.set_num_threads(1)
    config = msgspec.json.decode(argument.encode(), type=Config)
    network = NetworkThread()
    try:
        (serve_member if config.stages else serve_bootstrap)(config, network)
    except BaseException:  # noqa: BLE001 (a fork must not go on in the nursery)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # p2pd dies with the network thread


if __name__ == "__main__":
    serve_nursery(int(sys.argv[2]), be)
