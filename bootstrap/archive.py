"""The archive of a run: states and committed rounds, kept as bytes that members have signed, so that the run
outlives its clusters. It joins as a cluster does, but applies nothing and trains nothing.

STATE/archive/step-<t>/   states, see averaging/states.py; none at first, as theta_0 follows from the run spec
STATE/archive/rounds/     all rounds since the oldest of these, see averaging/kept.py

A new state is fetched when the rounds since the last one have grown as large as it: so the archive costs its
members at most twice what the averages alone would.
"""

import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from p2p_dilocox.averaging.catchup import Proven, fetch_average, read_result
from p2p_dilocox.averaging.company import CALL_FAILED, Company, Progress
from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.division import Division
from p2p_dilocox.averaging.download import Donor, fetch_state
from p2p_dilocox.averaging.joining import ask_offer, make_plan
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.states import OFFER, StateShelf, best_state, stage_file, steps_in
from p2p_dilocox.compression import Layout
from p2p_dilocox.errors import DilocoxError, NotTrustedError
from p2p_dilocox.lineage import genesis
from p2p_dilocox.runspec import RunSpec, tokens_per_outer_step
from p2p_dilocox.swarm.gate import Gate, allowed_with
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Decision,
    Follow,
    RankAddress,
    Result,
    StageDone,
    Standing,
    StateOffer,
    Votes,
)  # fmt: skip
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.signed import SignedRun, spec_digest

__all__ = ["Archive"]

_LINEAGES = 64  # remembered, to know a state of our own history
_NO_CLUSTER = "the archive trains nothing"
_SPARE_BYTES = 256 << 10  # of a state's file, for its header


class Archive:
    """Made by `open`; `look` is to be called every now and then. Implements service.Desk."""

    def __init__(
        self,
        spec: RunSpec,
        signed: SignedRun,
        key: SigningKey,
        node: Node,
        layouts: Mapping[int, Layout],
        directory: Path,
        keep: int,
        warn: Callable[[str], None],
    ) -> None:
        self._spec, self._node, self._directory, self._keep, self._warn = spec, node, directory, keep, warn
        self._layouts = layouts
        self._weight_cap = float(tokens_per_outer_step(spec))
        self._shelf, self._kept = StateShelf(directory), KeptRounds(directory / "rounds")
        timeouts = Timeouts(spec.deadlines.round_s)
        self._service = Service(
            node,
            Gate(key, spec.run.id, node.peer_id, allowed_with(spec.run.members, key.cluster_id)),
            patience_s=timeouts.round_s,
            average_of=self._kept.average_of,
            piece_of=self._shelf.piece,
        )
        self._progress = Progress(lineage=genesis(spec_digest(signed.text)), state="archive")
        self._company = Company(
            node=node, service=self._service, key=key, name="archive", ranks=[], signed=signed,
            timeouts=timeouts, progress=self._progress, weight_cap=self._weight_cap,
        )  # fmt: skip
        self._had_company = False
        self._whole = True  # whether we have all that leads to our outer step

    @property
    def t(self) -> int:
        """The last outer step that is kept."""
        return self._progress.committed_t

    @property
    def disk_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._directory.rglob("*") if file.is_file())

    async def open(self) -> None:
        """Answer others from now on, beginning with what an earlier start has kept."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(".partial-*"):
            shutil.rmtree(left, ignore_errors=True)
        await asyncio.to_thread(self._recover)
        maddrs = await self._node.maddrs()
        stages = list(range(self._spec.model.stages))
        self._company.ranks = [RankAddress(peer=self._node.peer_id, maddrs=maddrs[:16], stages=stages)]
        self._service.desk = self
        await self._service.start([])
        await self._company.start()

    async def close(self) -> None:
        with contextlib.suppress(*CALL_FAILED):
            await self._company.close()

    async def look(self) -> None:
        """Come to where the run is. Never raises because of others, or of the disk."""
        try:
            while await self._step():
                pass
            if self._keep:
                await self._refresh_base()
        except (DilocoxError, *CALL_FAILED) as error:
            self._warn(f"archive: {error}")
        except OSError as error:
            self._warn(f"the archive cannot be written: {error.strerror}. Free space in {self._directory}")
        present = bool(self._company.present)
        if self._had_company and not present and self.t:
            self._warn(self.said)
        self._had_company = present

    @property
    def begins(self) -> str:
        """What is kept, with the disk it takes."""
        if not self._keep:
            return f"archive: off, the run is known to be at outer step {self.t}"
        numel = sum(math.prod(s) for layout in self._layouts.values() for s in layout.shapes.values())
        each, rounds = 8 * numel / 1e6, "rounds of up to as much"
        lost = "" if self._whole else " was committed, but its state is not here"
        return (
            f"archive: outer step {self.t}{lost}; keeps {self._keep} states of {each:.1f} MB and {rounds} in "
            f"{self._directory}"
        )

    @property
    def said(self) -> str:
        """What the archive has, when nobody else is there."""
        if not (self._keep and self._whole):
            return (
                f"the last cluster has left at outer step {self.t}, whose state is not archived: "
                "the run goes on when one of them comes back"
            )
        size = self.disk_bytes / 1e6
        return (
            f"the last cluster has left. The archive holds outer step {self.t} ({size:.1f} MB): "
            "whoever joins goes on from there"
        )

    async def _step(self) -> bool:
        """Take the next rounds or a state. False if there is nothing to take."""
        furthest = max((p.t for p in self._company.present.values()), default=0)
        if furthest < self.t or (furthest == self.t and self._whole):
            return False
        p = self._progress
        before, lacking = (p.committed_t, p.lineage, p.members), not self._whole
        if lacking:  # somebody may have what we lack: take all of it anew
            self._move_to(0, self._company.genesis, [])
        self._progress.astray = ""  # make_plan finds where most members went on
        plan = await make_plan(self._company, 1)
        if lacking and plan.action not in ("follow", "download"):
            self._move_to(*before)
            return False
        self._whole = True
        if not self._keep and plan.action in ("follow", "download"):
            result = plan.results[-1] if plan.results else plan.offer.result if plan.offer else None
            if result is not None:
                proven = self._read(result)
                self._kept.forget_after(0)
                self._kept.remember(proven.roster.t, result, {})
                self._move_to(proven.roster.t, proven.lineage, proven.roster.ids)
            return plan.action == "follow"
        if plan.action == "rewind":
            self._kept.forget_after(0)
            self._move_to(0, self._company.genesis, [])
            return True
        if plan.action == "follow":
            for result in plan.results:
                await self._take_round(result, next(iter(plan.donors.values())))
            return True
        if plan.action == "download" and plan.offer is not None:
            await self._take_state(plan.offer, {c: list(r) for c, r in plan.donors.items()})
            return True
        return False

    async def _take_round(self, result: Result, donor: list[RankAddress]) -> None:
        proven = self._read(result)
        chunks = {}
        for stage, layout in self._layouts.items():
            division = Division(layout, proven.roster, self._spec.compression.gather_up_to)
            chunks[stage] = await fetch_average(self._service, donor, result, stage, division)
        await asyncio.to_thread(self._kept.remember, proven.roster.t, result, chunks)
        self._move_to(proven.roster.t, proven.lineage, proven.roster.ids)

    async def _take_state(self, offer: StateOffer, donors: Mapping[str, list[RankAddress]]) -> None:
        fetched = await fetch_state(
            self._service, offer, [Donor(name, ranks) for name, ranks in donors.items()], self._limits(),
            self._directory / "incoming", lambda _received, _total: None,
        )  # fmt: skip
        await asyncio.to_thread(self._put, offer, fetched)
        if (
            self._progress.lineages.get(offer.t) != offer.lineage
        ):  # not one of our own history: it begins here
            proven = self._read(offer.result)
            self._kept.forget_after(0)
            self._kept.remember(offer.t, offer.result, {})
            self._move_to(offer.t, offer.lineage, proven.roster.ids)

    def _put(self, offer: StateOffer, fetched: Mapping[int, Path]) -> None:
        """A state is there whole or not at all; older ones than are to be kept go, and the rounds before."""
        partial = self._directory / f".partial-{offer.t}"
        partial.mkdir(exist_ok=True)
        for stage, path in fetched.items():
            path.replace(partial / stage_file(stage))
        (partial / OFFER).write_bytes(offer.pack())
        for path in partial.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        step = self._directory / f"step-{offer.t}"
        shutil.rmtree(step, ignore_errors=True)
        partial.rename(step)
        steps = steps_in(self._directory)
        for old in steps[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)
        self._kept.prune(min(int(s.name.removeprefix("step-")) for s in steps[: self._keep]))

    async def _refresh_base(self) -> None:
        """Fetch a newer state once the rounds since the last one are as large; a joiner needs both."""
        base = self._offer()
        size = sum(self._limits().values())
        if base is not None:
            size = sum(digest.size for digest in base.files.values())
        if self._kept.bytes_after(base.t if base else 0) < size:
            return
        others = [c for c in self._company.present if c != self._company.me]
        offers = [o for o in await asyncio.gather(*(ask_offer(self._company, c) for c in others)) if o]
        ours = self._progress.lineages
        newer = [o for o in offers if o[1].t > (base.t if base else 0) and ours.get(o[1].t) == o[1].lineage]
        best = best_state(newer)
        if best is not None:
            await self._take_state(best.offer, {c: self._company.ranks_of(c) for c in best.donors})

    def _limits(self) -> dict[int, int]:
        """Most bytes of each stage's file: anchor and two moments in float32, a basis of less."""
        return {
            stage: 16 * sum(math.prod(shape) for shape in layout.shapes.values()) + _SPARE_BYTES
            for stage, layout in self._layouts.items()
        }

    def _recover(self) -> None:
        base = self._offer()
        if base is not None:
            proven = self._read(base.result)
            self._move_to(base.t, base.lineage, proven.roster.ids)
        while chain := self._kept.chain(self.t, self._progress.lineage, self._read, 64):
            for result in chain:
                proven = self._read(result)
                self._move_to(proven.roster.t, proven.lineage, proven.roster.ids)
        newest = self._kept.newest_proof()
        if newest is not None and newest.call.t > self.t:  # known to be committed, though we do not have it
            proven = self._read(newest)
            self._move_to(proven.roster.t, proven.lineage, proven.roster.ids)
            self._whole = not self._keep

    def _offer(self) -> StateOffer | None:
        try:
            return self._shelf.offer()
        except NotTrustedError:
            return None

    def _read(self, result: Result) -> Proven:
        return read_result(result, self._spec.run.id, self._service.gate, self._weight_cap)

    def _move_to(self, t: int, lineage: str, members: list[str]) -> None:
        p = self._progress
        p.t, p.committed_t, p.lineage, p.members = t, t, lineage, members
        p.lineages = dict([*p.lineages.items(), (t, lineage)][-_LINEAGES:])

    # --- service.Desk: it tells what it has; it takes part in nothing

    async def on_standing(self) -> Standing:
        return self._company.standing()

    async def on_result(self, ask: Ask) -> Result:
        return self._kept.result_after(ask.t)

    async def on_state(self) -> StateOffer:
        return await asyncio.to_thread(self._shelf.offer)

    async def on_hello(self, sealed: bytes, peer: str) -> Standing:
        return self._company.standing()

    def heard(self, cluster: str) -> None:
        self._company.heard(cluster)

    async def on_ready(self, sealed: bytes) -> CallReply:
        raise NotTrustedError(_NO_CLUSTER)

    async def on_call(self, ask: Ask) -> CallReply:
        raise NotTrustedError(_NO_CLUSTER)

    async def on_stage_done(self, done: StageDone) -> Decision:
        raise NotTrustedError(_NO_CLUSTER)

    async def on_votes(self, votes: Votes, cluster: str) -> Votes:
        raise NotTrustedError(_NO_CLUSTER)

    async def on_follow(self, ask: Ask) -> Follow:
        raise NotTrustedError(_NO_CLUSTER)
