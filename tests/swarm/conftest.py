"""A swarm in one process: real nodes on loopback, real streams; every rank with a network thread of its
own."""

import contextlib
import importlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.tiny_llama import TINY_LLAMA
from p2p_dilocox.averaging.coded import StageLayouts, codec_thread
from p2p_dilocox.averaging.company import Company, Progress
from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, Round
from p2p_dilocox.averaging.round import Rounds
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.states import StateShelf
from p2p_dilocox.lineage import genesis
from p2p_dilocox.outer import OuterState
from p2p_dilocox.runspec import RunSpec, parse_run
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.loop import NetworkThread
from p2p_dilocox.swarm.messages import RankAddress
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.signed import SignedRun, sign_run, spec_digest

SHAPES = {
    0: {"embed.weight": (96, 64), "layers.0.weight": (128, 64), "layers.0.norm": (64,)},
    1: {"layers.1.weight": (64, 192), "layers.1.norm": (64,), "norm.weight": (64,)},
}
DENSE = frozenset({"embed.weight"})
WEIGHT_CAP = 1000.0

SPEC = (
    """
[run]
id = "test"
recipe = "{recipe}"
outer_steps = 100
min_clusters = {min_clusters}
[model]
stages = 2
"""
    + TINY_LLAMA
    + """\
[data]
seq_len = 32
[inner]
H = 4
batch_size = 4
microbatches = 2
lr = 1e-3
[deadlines]
round_s = {round_s}
{more}
"""
)


def spec_text(
    recipe: str = "dilocox", *, min_clusters: int = 1, round_s: float = 20.0, more: str = ""
) -> str:
    return SPEC.format(recipe=recipe, min_clusters=min_clusters, round_s=round_s, more=more)


def start_parameters(stages: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    everything = {
        n: torch.randn(shape, generator=generator) for s in sorted(SHAPES) for n, shape in SHAPES[s].items()
    }
    return {n: everything[n] for s in stages for n in SHAPES[s]}


class SwarmRank:
    """One rank: its parameters are plain tensors that a test moves by hand."""

    def __init__(
        self,
        spec: RunSpec,
        digest: str,
        link: tuple[bytes, list[str]],
        stages: list[int],
        key: SigningKey,
        client: bool,
    ) -> None:
        organiser, peers = link
        self.spec, self.stages = spec, stages
        self.network = NetworkThread()
        self.node = self.network.call(
            Node.start(
                run_id="test",
                organiser=organiser,
                initial_peers=peers,
                client_mode=client,
                host_maddrs=[] if client else ["/ip4/127.0.0.1/tcp/0"],
            ),  # fmt: skip
            30,
        )
        self.parameters = start_parameters(stages)
        self.outer = OuterState(spec, self.parameters, DENSE, genesis(digest))
        self.progress = Progress(lineage=self.outer.lineage, state="training")
        self.names = {s: list(SHAPES[s]) for s in stages}
        self.timeouts = Timeouts(spec.deadlines.round_s)
        self.directory = tempfile.TemporaryDirectory()
        self.kept = KeptRounds(Path(self.directory.name) / "rounds")
        self.service = Service(
            self.node,
            Gate(key, "test", self.node.peer_id, spec.run.members),
            patience_s=self.timeouts.round_s,
            average_of=self.kept.average_of,
            piece_of=StateShelf(Path(self.directory.name)).piece,
        )
        self.codec = codec_thread()
        maddrs = self.network.call(self.node.maddrs(), 10)
        self.address = RankAddress(peer=self.node.peer_id, maddrs=maddrs, stages=stages)
        self.rounds: Rounds
        self.pending: Round | None = None
        self.closed = False

    def move(self, delta: dict[str, Tensor] | float) -> float:
        """Move theta_i by -delta. Returns the squared norm of what there is to contribute."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.sub_(delta if isinstance(delta, float) else delta[name])
        self.outer.contribute(self.parameters)
        return sum(float(r.double().square().sum()) for r in self.outer.residual.values())

    def start(self, t: int, weight: float, norm: float, fingerprint: tuple[float, ...] = ()) -> None:
        self.pending = self.rounds.start(t, Offer(weight, norm, fingerprint))

    def land(self, keep: float = 0.5) -> Outcome:
        assert self.pending is not None
        outcome = self.pending.wait(lambda: False)
        assert outcome is not None
        self.pending = None
        last = outcome.steps[-1] if outcome.steps else None
        if last is not None and last.own is not None:
            self.outer.commit(last.average, last.own)
        if last is not None:
            with self.outer.restart_(self.parameters, keep):
                for step in outcome.steps:
                    self.outer.step(step.average, step.t, step.members, step.digest)
        self.progress.move_to(max(outcome.t, self.outer.t), self.outer)
        return outcome

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(Exception):
                self.network.call(self.node.close(), 5)
            self.network.close()
            self.codec.shutdown(wait=False, cancel_futures=True)
            self.directory.cleanup()


class SwarmCluster:
    def __init__(
        self,
        text: str,
        link: tuple[bytes, list[str]],
        signed: SignedRun,
        split: list[list[int]],
        key: SigningKey | None = None,
        client: bool = False,
    ) -> None:
        spec = parse_run(text)
        digest = spec_digest(text)
        self.key = key or SigningKey.generate()
        self.id = self.key.cluster_id
        self.ranks = [SwarmRank(spec, digest, link, stages, self.key, client) for stages in split]
        addresses = [r.address for r in self.ranks]
        first = self.ranks[0]
        company = Company(
            node=first.node, service=first.service, key=self.key, name="test", ranks=addresses, signed=signed,
            timeouts=first.timeouts, progress=first.progress, weight_cap=WEIGHT_CAP,
        )  # fmt: skip
        self.lead = Lead(
            company,
            spec_digest=digest,
            num_stages=len(SHAPES),
            min_clusters=spec.run.min_clusters,
            quorum=spec.run.quorum,
            result_after=first.kept.result_after,
            offer=StateShelf(Path(first.directory.name)).offer,
        )
        first.service.desk = self.lead
        for rank in self.ranks:
            rank.rounds = Rounds(
                loop=rank.network.loop, service=rank.service, outer=rank.outer,
                layouts={s: StageLayouts(rank.outer, rank.names[s], DENSE, 2) for s in rank.stages},
                me=self.id, lead=self.lead if rank is first else None, lead_peer=first.node.peer_id,
                progress=rank.progress, timeouts=rank.timeouts, weight_cap=WEIGHT_CAP, codec=rank.codec,
                kept=rank.kept,
            )  # fmt: skip
            for address in addresses:
                if address.peer != rank.node.peer_id:
                    rank.network.call(rank.node.connect(address.peer, address.maddrs), 10)
            rank.network.call(rank.service.start([a.peer for a in addresses]), 10)
        first.network.call(self.lead.company.start(), 10)

    def contribute(
        self,
        t: int,
        delta: dict[str, Tensor] | float,
        weight: float = 100.0,
        fingerprint: tuple[float, ...] = (),
    ) -> None:
        norm = math.sqrt(sum(rank.move(delta) for rank in self.ranks))
        for rank in self.ranks:
            rank.start(t, weight, norm, fingerprint)

    def land(self) -> list[Outcome]:
        return [rank.land() for rank in self.ranks]

    def digests(self) -> dict[int, str]:
        return {s: r.outer.digest(r.names[s]) for r in self.ranks for s in r.stages}

    def anchor(self) -> dict[str, Tensor]:
        return {n: t for r in self.ranks for n, t in r.outer.anchor.items()}

    def close(self) -> None:
        first = self.ranks[0]
        if not first.closed:
            first.network.call(self.lead.close(), 10)
            self.die()

    def die(self) -> None:
        """End without a word, as a lost machine does: p2pd is gone, nothing is withdrawn."""
        for rank in self.ranks:
            rank.close()


class Swarm:
    def __init__(self, text: str) -> None:
        self.text = text
        self.organiser = SigningKey.generate()
        self.network = NetworkThread()
        self.boot = self.network.call(
            Node.start(run_id="test", organiser=self.organiser.public, host_maddrs=["/ip4/127.0.0.1/tcp/0"]),
            30,
        )
        self.signed = sign_run(self.organiser, "test", text)
        self.network.call(self.boot.publish_run(self.signed), 10)
        self.link = (self.organiser.public, self.network.call(self.boot.maddrs(), 10))
        self.clusters: list[SwarmCluster] = []

    def join(
        self, split: list[list[int]] | None = None, *, key: SigningKey | None = None, client: bool = False
    ) -> SwarmCluster:
        cluster = SwarmCluster(self.text, self.link, self.signed, split or [[0, 1]], key, client)
        self.clusters.append(cluster)
        for other in self.clusters:  # what their next heartbeat would do
            first = other.ranks[0]
            if not first.closed:
                first.network.call(other.lead.company.refresh(), 10)
        return cluster

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close()
        self.network.call(self.boot.close(), 5)
        self.network.close()


@pytest.fixture
def swarm() -> Iterator[Callable[[str], Swarm]]:
    made: list[Swarm] = []

    def make(text: str) -> Swarm:
        made.append(Swarm(text))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def rank_module() -> Any:
    """The module behind the installed worker; imported by its installed name, see pyproject.toml."""
    return importlib.import_module("p2p_dilocox.peers.rank")
