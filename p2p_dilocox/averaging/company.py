"""The clusters of a run as one of them sees them: who is there, where each stands, is there one history."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from hivemind.p2p import P2PDaemonError, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from p2p_dilocox.averaging.catchup import Proven, read_result
from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.outer import OuterState
from p2p_dilocox.swarm.clock import Clock
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import (
    Ask,
    DataClaim,
    Envelope,
    Presence,
    RankAddress,
    Result,
    Standing,
    seal,
)  # fmt: skip
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.records import RUN_LIFE_S
from p2p_dilocox.swarm.signed import SignedRun

__all__ = ["CALL_FAILED", "Company", "Progress", "outranks"]

CALL_FAILED = (
    P2PDaemonError, P2PHandlerError, ControlFailure, asyncio.TimeoutError, ConnectionError, NotTrustedError,
)  # fmt: skip
_HEARTBEAT_S = 3.0
_LOOK_AROUND_S = 10.0
_CLOCKS_ASKED = 5
_GOODBYE_S = 3.0
_OTHERS_KEPT = 64
_LINEAGES_KEPT = 64
_NO_DOUBT = Deadline(0)
_Reply = TypeVar("_Reply")


@dataclass
class Progress:
    """What the training loop tells the swarm. Written by one thread, read by another, field by field."""

    t: int = 0  # the last outer step that is over, committed or dropped
    h: int = 0
    committed_t: int = 0
    lineage: str = ""
    members: list[str] = field(default_factory=list)
    in_flight: int = 0
    follows: int = 0  # the outer step of a round that this cluster came too late for
    state: str = "joining"
    loss: float = 0.0
    tokens_per_s: float = 0.0
    tokens: int = 0
    lineages: dict[int, str] = field(default_factory=dict)  # of recent committed outer steps
    data: DataClaim = DataClaim()  # ours, and those of the others that train
    others_data: dict[str, DataClaim] = field(default_factory=dict)
    astray: str = ""  # why this cluster should give up its history for another one
    duplicate: str = ""  # why this cluster has to go: its identity is in use elsewhere, its clock is wrong

    def move_to(self, t: int, outer: OuterState) -> None:
        """Outer step t is over and left `outer` behind."""
        self.lineages = dict([*self.lineages.items(), (outer.t, outer.lineage)][-_LINEAGES_KEPT:])
        self.t, self.committed_t, self.lineage, self.members = t, outer.t, outer.lineage, outer.members


def outranks(theirs: tuple[int, int], ours: tuple[int, int]) -> bool:
    """Whether of two histories that parted, (members of the last round, committed steps), theirs goes on."""
    return theirs > ours


class Company:
    """Our cluster's lead among the leads. All of it runs in the network thread's event loop."""

    def __init__(
        self,
        *,
        node: Node,
        service: Service,
        key: SigningKey,
        name: str,
        ranks: list[RankAddress],
        signed: SignedRun,
        timeouts: Timeouts,
        progress: Progress,
        weight_cap: float,
    ) -> None:
        """weight_cap: tokens that a cluster can train in one outer step."""
        self.node, self.key, self.ranks = node, key, ranks
        self.timeouts, self.progress, self.weight_cap = timeouts, progress, weight_cap
        self.me = key.cluster_id
        self.present: dict[str, Presence] = {}
        self.name, self._service, self._signed = name, service, signed
        self.gate = service.gate
        self.genesis = progress.lineage  # of theta_0
        self._clock = Clock()
        self._since, self._published = time.time(), False
        self._ranks: dict[str, list[RankAddress]] = {}
        self._departed: dict[str, float] = {}  # who said that it leaves or pauses, and since when it was here
        self._doubted: dict[str, Deadline] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.refresh()
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._look_around())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.progress.state = "left"
        await self.announce()

    async def announce(self) -> None:
        """Tell all what `progress.state` is now: nobody waits for a cluster that has left or paused."""
        told = asyncio.gather(self.node.publish_presence(self.key, self.presence()), self._hello())
        with contextlib.suppress(TimeoutError):
            await within(told, _GOODBYE_S)

    def presence(self) -> Presence:
        p = self.progress
        return Presence(
            cluster_id=self.me, name=self.name, ranks=self.ranks, t=p.t, h=p.h, state=p.state,
            loss=p.loss, tokens_per_s=p.tokens_per_s, tokens=p.tokens, since=self._since,
            data=p.data,
        )  # fmt: skip

    def standing(self) -> Standing:
        p = self.progress
        return Standing(
            cluster_id=self.me, t=p.t, h=p.h, committed_t=p.committed_t, lineage=p.lineage, members=p.members,
            in_flight=p.in_flight, follows=p.follows,
        )  # fmt: skip

    def coordinators(self) -> list[str]:
        """The members of the last committed round, who so agree on this list; all present at the start, and
        when none of those members is there any more: who has the state of a run goes on with it.

        Those that nobody can dial hold no roll call, unless there are no others; those that have left or
        paused, we ourselves among them, are passed over.
        """
        away = {*self._departed, *([self.me] if self.progress.state == "paused" else [])}
        members, present = self.progress.members, {*self.present, self.me}
        clusters = members if present & set(members) else sorted(present)
        clusters = [c for c in clusters if c not in away] or clusters
        return [c for c in clusters if all(r.maddrs for r in self.ranks_of(c))] or clusters

    def expected(self) -> list[str]:
        """The clusters that the next outer step waits for: the last members, and those in step with us.

        A heartbeat is some seconds old, so "in step" leaves room for two outer steps.
        """
        in_step = {c for c, p in self.present.items() if p.state == "training" and p.t >= self.progress.t - 2}
        return sorted({*self.coordinators(), *in_step} - self._departed.keys())

    def uplink_mbps(self) -> float:
        """As measured when much was sent, to three digits; 0 if it never was."""
        return float(f"{self._service.traffic.uplink_mbps:.3g}")

    def others(self) -> list[str]:
        """Every cluster we have met, ourselves left out."""
        return list(self._ranks)

    def ranks_of(self, cluster: str) -> list[RankAddress]:
        return self.ranks if cluster == self.me else self._ranks.get(cluster, [])

    def addresses(self) -> list[list[str]]:
        """Where the leads can be dialled: ours, then those of the clusters that are there."""
        others = [p.ranks[0].maddrs for c, p in sorted(self.present.items()) if c != self.me]
        return [self.ranks[0].maddrs, *others]

    async def refresh(self) -> None:
        """Tell the swarm that we are here and look who else is."""
        before, self.present = self.present, await self.node.clusters()
        self._look_for_a_twin(self.present.get(self.me))
        await self.node.publish_presence(self.key, self.presence())
        self._published = True
        self.present = {c: p for c, p in self.present.items() if self._allowed(c)}
        training = {c: p.data for c, p in self.present.items() if p.state == "training" and c != self.me}
        self.progress.others_data = training
        for cluster in [c for c, p in self.present.items() if before.get(c) != p]:
            self.heard(cluster)  # its heart beats
        for cluster, presence in self.present.items():
            if presence.since > self._departed.get(cluster, math.inf):
                self.back(cluster)  # another start of it
            await self.meet(cluster, presence.ranks)

    def _allowed(self, cluster: str) -> bool:
        try:
            self.gate.require(cluster)
        except NotTrustedError:
            return False
        return True

    def _look_for_a_twin(self, mine: Presence | None) -> None:
        """Our record as others see it. Before our first heartbeat it may be of an earlier start."""
        if mine is None or not self._published or mine.ranks == self.ranks:
            return
        if (mine.since, mine.ranks[0].maddrs) < (self._since, self.ranks[0].maddrs):
            where = ", ".join(mine.ranks[0].maddrs[:2]) or "elsewhere"
            self.progress.duplicate = (
                f"cluster {self.me} is in this run already, from {where}. "
                "Use another --state-dir: two machines cannot share one identity"
            )

    async def greet(self) -> dict[str, Standing]:
        """Tell every other lead our presence now, and learn where each stands.

        A heartbeat in the DHT would reach them seconds later, when a round without us may have begun.
        """
        await self.refresh()
        return await self._hello()

    async def _hello(self) -> dict[str, Standing]:
        hello = Envelope(body=seal(self.key, self.node.run_id, self.presence()))
        others = [c for c in self.present if c != self.me]
        answers = await asyncio.gather(
            *(self.ask(c, lambda stub: stub.rpc_hello(hello, timeout=self.timeouts.reply_s)) for c in others)
        )
        return {c: s for c, s in zip(others, answers, strict=True) if s is not None}

    async def archives(self) -> dict[str, Standing]:
        """Where those stand that keep states and train nothing."""
        found = {c: p for c, p in (await self.node.archives()).items() if c != self.me}
        for cluster, presence in found.items():
            await self.meet(cluster, presence.ranks)
        standings = await asyncio.gather(*(self.standing_of(c) for c in found))
        return {c: s for c, s in zip(found, standings, strict=True) if s is not None}

    async def meet(self, cluster: str, ranks: list[RankAddress]) -> None:
        """Remember a cluster's ranks and tell p2pd where they live."""
        if cluster == self.me or self._ranks.get(cluster) == ranks:
            return
        self._ranks[cluster] = ranks
        while len(self._ranks) > _OTHERS_KEPT:
            del self._ranks[next(iter(self._ranks))]
        await asyncio.gather(*(self.node.connect(r.peer, r.maddrs) for r in ranks))

    async def ask(self, cluster: str, question: Callable[[Any], Awaitable[_Reply]]) -> _Reply | None:
        """The answer of a cluster's lead; None if we do not know it, it cannot be reached, or it refuses.

        question: calls one RPC of the stub it is given, with a timeout.
        """
        ranks = self._ranks.get(cluster)
        if ranks is None or not self._doubted.get(cluster, _NO_DOUBT).passed:
            return None
        try:
            return await question(self._service.stub(ranks[0].peer))
        except TimeoutError:
            self.doubt(cluster)
            return None
        except CALL_FAILED:
            return None

    def doubt(self, cluster: str) -> None:
        """It seems frozen: it is not asked again for a round, or until it speaks. Else we would wait for it
        at each turn of a round, one after the other.
        """
        self._doubted[cluster] = Deadline(self.timeouts.round_s)

    def heard(self, cluster: str) -> None:
        """It has spoken to us."""
        self._doubted.pop(cluster, None)

    def back(self, cluster: str) -> None:
        """It takes part, whatever it said before."""
        self._departed.pop(cluster, None)

    async def greeted(self, presence: Presence) -> bool:
        """A cluster's own lead told us its presence. Whether it takes part from now on."""
        cluster = presence.cluster_id
        self.heard(cluster)
        self.present[cluster] = presence
        await self.meet(cluster, presence.ranks)
        if presence.state in ("left", "paused"):
            self._departed[cluster] = presence.since
            while len(self._departed) > _OTHERS_KEPT:
                del self._departed[next(iter(self._departed))]
            return False
        self.back(cluster)
        return True

    async def standing_of(self, cluster: str, again: bool = False) -> Standing | None:
        """Where a cluster stands; None if it does not answer in time. again: ask though it seems frozen."""
        if again:
            self.heard(cluster)
        if cluster == self.me:
            return self.standing()  # perhaps late, but not dead
        ask = Ask(shown=self.gate.own)
        return await self.ask(cluster, lambda stub: stub.rpc_standing(ask, timeout=self.timeouts.reply_s))

    async def result_after(self, cluster: str, t: int) -> Result | None:
        """The first round after outer step t that a cluster keeps."""
        ask = Ask(t=t, shown=self.gate.own)
        return await self.ask(cluster, lambda stub: stub.rpc_result(ask, timeout=self.timeouts.reply_s))

    async def voters(self, standing: Standing) -> int:
        """How many members prove that they committed what the standing says; 0 if it cannot prove it."""
        proven = await self._proven_after(standing.cluster_id, standing.committed_t - 1)
        return len(proven.roster.ids) if proven and proven.lineage == standing.lineage else 0

    async def results_from(self, cluster: str, t: int, lineage: str, last: int, most: int) -> list[Result]:
        """The committed rounds after (t, lineage), up to outer step `last`, `most` at most, as a cluster has
        proven them. Raises NotTrustedError if it does not keep them or has another history.
        """
        results: list[Result] = []
        while t < last and len(results) < most:
            result = await self.result_after(cluster, t)
            if result is None or result.call.t <= t:
                raise NotTrustedError(f"cluster {cluster} does not keep the round after outer step {t}")
            proven = read_result(result, self.node.run_id, self.gate, self.weight_cap)
            if proven.roster.parent != lineage:
                raise NotTrustedError(f"cluster {cluster} has another history after outer step {t}")
            t, lineage = proven.roster.t, proven.lineage
            results.append(result)
        return results

    async def parent_of(self, cluster: str, t: int) -> str:
        """The lineage that the committed round of outer step t follows from, as a cluster proves it; "" if
        not.
        """
        proven = await self._proven_after(cluster, t - 1)
        return proven.roster.parent if proven and proven.roster.t == t else ""

    async def _proven_after(self, cluster: str, t: int) -> Proven | None:
        result = await self.result_after(cluster, t)
        if result is None:
            return None
        try:
            return read_result(result, self.node.run_id, self.gate, self.weight_cap)
        except NotTrustedError:
            return None

    async def linger(self, t: int) -> None:
        """Stay until those we averaged with are past outer step t as well: they may still need our votes."""
        deadline = Deadline(2 * self.timeouts.reply_s)
        others = [c for c in self.progress.members if c != self.me]
        while others and not deadline.passed:
            standings = [(c, await self.standing_of(c)) for c in others]
            others = [c for c, s in standings if s is not None and s.t < t]
            await deadline.sleep(0.2)

    async def _beat(self) -> None:
        republish = Deadline(0)
        while True:
            try:
                await self.refresh()
                if republish.passed:  # the run can then be joined through any live peer
                    await self.node.publish_run(self._signed)
                    republish = Deadline(RUN_LIFE_S / 4)
                if self.progress.state == "training":  # else it looks where the others are when it comes in
                    await self._compare_histories()
            except CALL_FAILED:
                pass  # the next beat tries again; a lasting failure shows as an empty swarm in the view
            await asyncio.sleep(_HEARTBEAT_S)

    async def _look_around(self) -> None:
        """Now and then: is the link's peer back, is our clock still right?"""
        while True:
            await asyncio.sleep(_LOOK_AROUND_S)
            with contextlib.suppress(*CALL_FAILED, OSError):
                await self.node.reattach()
                leads = [ranks[0].peer for ranks in self._ranks.values()][-_CLOCKS_ASKED:]
                asked = [partial(self.node.time_at, peer) for peer in (*self.node.entry_peers, *leads)]
                if fault := await self._clock.fault(asked):
                    self.progress.duplicate = fault

    async def _compare_histories(self) -> None:
        """Clusters that lost sight of each other may have gone on as two swarms: one history has to end."""
        for cluster in [c for c in self.present if c != self.me and c not in self.progress.members]:
            theirs = await self.standing_of(cluster)
            ours = self.standing()
            if theirs is None or not theirs.committed_t or not ours.committed_t:
                continue
            if theirs.committed_t > ours.committed_t:  # perhaps just ahead of us
                parted = await self.parent_of(cluster, ours.committed_t + 1) != ours.lineage
            else:  # perhaps just behind us
                known = self.progress.lineages
                parted = theirs.committed_t >= min(known) and known.get(theirs.committed_t) != theirs.lineage
            if not parted:
                continue
            voters = await self.voters(theirs)
            ranks = ((voters, theirs.committed_t), (len(ours.members), ours.committed_t))
            if self.progress.lineage == ours.lineage and outranks(*ranks):
                self.progress.astray = (
                    f"the run went on elsewhere: {voters} clusters are at outer step {theirs.committed_t}, "
                    f"our {len(ours.members)} at {ours.committed_t} share no history with them"
                )
