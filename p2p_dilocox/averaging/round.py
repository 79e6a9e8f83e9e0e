"""The rounds of a rank: what the training loop starts, and picks up when it is over.

A round runs in the network thread: roll call, butterfly of every stage the rank holds, votes; if a member is
lost, again
with the survivors while there is time. The training loop sees three things only: start, ready, wait.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from p2p_dilocox.averaging.butterfly import Butterfly, ContributionError
from p2p_dilocox.averaging.catchup import decode_average, fetch_average
from p2p_dilocox.averaging.coded import CodedStage, chunk_ranges, merged
from p2p_dilocox.averaging.company import CALL_FAILED, Progress
from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.rollcall import Roster, read_call
from p2p_dilocox.averaging.service import Service, VectorKey
from p2p_dilocox.compression import Layout
from p2p_dilocox.compression.layout import Phase
from p2p_dilocox.errors import ClusterError, NotTrustedError
from p2p_dilocox.lineage import combined_digest, round_digest
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Decision,
    Follow,
    RankAddress,
    Result,
    StageDone,
)

__all__ = ["Outcome", "OuterStep", "Round", "Rounds", "codec_thread"]

_GLANCE_S = 0.2  # how often a waiting training loop looks whether it should leave
_ATTEMPTS = 4
_PAUSE_S = 0.5
_KEPT = 64  # committed rounds kept for clusters that were not in them, within
_KEPT_BYTES = 256 << 20
_T = TypeVar("_T")


@dataclass(frozen=True)
class OuterStep:
    """A committed round, as this rank applies it. `own` is None if we were not in it."""

    t: int
    members: list[str]
    weights: list[float]
    parent: str
    digest: str
    stage_digests: dict[int, str]
    average: Average
    own: Average | None


@dataclass(frozen=True)
class Outcome:
    """How the round of outer step t ended. No steps: it was dropped, by every cluster, for `reason`."""

    t: int
    steps: list[OuterStep] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    attempts: int = 1
    failed: bool = False  # this cluster cannot go on from its state


class Round:
    """A round in the background."""

    def __init__(self, t: int, future: "concurrent.futures.Future[Outcome]") -> None:
        self.t = t
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self, give_up: Callable[[], bool]) -> Outcome | None:
        """The outcome, or None once `give_up` says so. Never raises
        because a peer died, never later than the deadline."""
        while True:
            try:
                return self._future.result(_GLANCE_S)
            except concurrent.futures.TimeoutError:
                if give_up():
                    self._future.cancel()
                    return None


def codec_thread() -> ThreadPoolExecutor:
    """One thread with one torch thread: matrix products give other
    bits with another number of threads (measured)."""
    return ThreadPoolExecutor(1, "codec", initializer=torch.set_num_threads, initargs=(1,))


class Rounds:
    """Starts rounds in `loop`. One at a time; `outer.residual`
    and `outer.basis` must not change while one runs.

    layouts: of every stage this rank holds. lead: set on rank 0 only; the others ask `lead_peer`.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        service: Service,
        outer: OuterState,
        layouts: dict[int, Layout],
        me: str,
        lead: Lead | None,
        lead_peer: str,
        progress: Progress,
        timeouts: Timeouts,
        codec: ThreadPoolExecutor,
    ) -> None:
        self._loop, self.service, self._outer, self.layouts = loop, service, outer, layouts
        self._me, self._lead, self._lead_peer = me, lead, lead_peer
        self._progress, self._timeouts, self._codec = progress, timeouts, codec
        self._chunks: dict[int, dict[int, list[bytes]]] = {}  # t -> stage -> encoded average
        self._results: dict[int, Result] = {}
        self._open: list[VectorKey] = []

    def start(self, t: int, offer: Offer) -> Round:
        """Offer `outer.residual` to the round of outer step t."""
        deadline = Deadline(self._timeouts.round_s)
        self._progress.in_flight = t
        return self._launch(t, self._run(t, offer, deadline))

    def follow(self, t: int) -> Round:
        """Wait for the round of outer step t, which started before we were here."""
        deadline = Deadline(self._timeouts.round_s)
        return self._launch(t, self._follow(t, deadline, self.service.traffic.received))

    def average_of(self, t: int, stage: int) -> list[bytes]:
        """The encoded average of a recent committed round. Raises NotTrustedError if it is not kept."""
        try:
            return self._chunks[t][stage]
        except KeyError:
            raise NotTrustedError(f"outer step {t}, stage {stage} is not kept here") from None

    def result_after(self, t: int) -> Result:
        """The first kept round after outer step t; its `parent` tells
        whether it is the next. NotTrustedError if none."""
        later = [k for k in self._results if k > t]
        if not later:
            raise NotTrustedError(f"no round after outer step {t} is kept here")
        return self._results[min(later)]

    def _launch(self, t: int, body: Coroutine[Any, Any, Outcome]) -> Round:
        async def bounded() -> Outcome:
            try:
                async with asyncio.timeout(
                    3 * self._timeouts.round_s
                ):  # each wait has its own; this one is the last
                    return await body
            except (ClusterError, *CALL_FAILED) as error:
                return Outcome(t, reason=str(error), failed=True)
            finally:
                self._progress.in_flight = 0

        return Round(t, asyncio.run_coroutine_threadsafe(bounded(), self._loop))

    async def _run(self, t: int, offer: Offer, deadline: Deadline) -> Outcome:
        started, traffic = time.monotonic(), self.service.traffic
        sent, received = traffic.sent, traffic.received
        coded = {stage: CodedStage(self._outer, layout) for stage, layout in self.layouts.items()}
        vectors = {
            s: asyncio.ensure_future(self._compute(c.vector_p)) for s, c in coded.items()
        }  # while others arrive
        reason, attempt = "no time for a roll call", 0
        while not deadline.passed:
            reply = await self._roll_call(t, attempt, offer, deadline)
            if reply.over:
                return await self._follow(t, deadline, received)
            if reply.call is None:
                reason = reply.refused or "no roll call in time"
                break
            roster = read_call(reply.call, self.service.node.run_id)
            if roster.index_of(self._me) is None:
                return await self._follow(t, deadline, received)
            done, averaged, chunks = await self._average(t, roster, coded, vectors, deadline)
            decision = await self._decision(done, deadline)
            while self._open:  # until here others may still have been fetching our part
                self.service.exchanges.close(self._open.pop())
            if decision.outcome == "committed":
                average = merged([a for a, _ in averaged.values()])
                own = merged([o for _, o in averaged.values()])
                step = self._keep(t, roster, decision.digest, done, average, own, chunks)
                seconds = time.monotonic() - started
                return Outcome(
                    t, [step], "", seconds, traffic.sent - sent, traffic.received - received, attempt + 1
                )  # fmt: skip
            reason = decision.reason or done.reason
            attempt += 1
            if attempt == _ATTEMPTS:
                break
            await deadline.sleep(_PAUSE_S)  # for whoever is gone to be seen as gone
        await asyncio.gather(*vectors.values())  # the residual may change once we return
        return Outcome(
            t,
            [],
            reason,
            time.monotonic() - started,
            traffic.sent - sent,
            traffic.received - received,
            attempt,
        )

    async def _average(
        self,
        t: int,
        roster: Roster,
        coded: dict[int, CodedStage],
        vectors: "Mapping[int, asyncio.Future[Tensor]]",
        deadline: Deadline,
    ) -> tuple[StageDone, dict[int, tuple[Average, Average]], dict[int, list[bytes]]]:
        """Average every stage we hold with the roster's members. A stage that fails has "" for a digest."""
        digests, reasons = {}, []
        averaged: dict[int, tuple[Average, Average]] = {}
        chunks: dict[int, list[bytes]] = {}

        async def one(stage: int) -> None:
            code = coded[stage]
            try:
                async with asyncio.timeout(
                    max(0.1, deadline.within(roster.remaining_s) - self._timeouts.reply_s)
                ):
                    p = await self._butterfly(
                        t, roster, stage, "p", code.layout, await asyncio.shield(vectors[stage])
                    )
                    q_vector = await self._compute(lambda: code.vector_q(p.average))
                    q = await self._butterfly(t, roster, stage, "q", code.layout, q_vector)
            except (ContributionError, *CALL_FAILED) as error:
                digests[str(stage)] = ""
                reasons.append(f"stage {stage}: {_who(error, roster)}{str(error) or 'out of time'}")
                return
            averaged[stage] = (code.decode(p.average, q.average), code.decode(p.own, q.own))
            chunks[stage] = [data for part in (*p.chunks, *q.chunks) for data in part]
            digests[str(stage)] = await self._compute(lambda: round_digest(chunks[stage]))

        await asyncio.gather(*(one(stage) for stage in coded))
        done = StageDone(t=t, attempt=roster.attempt, digests=digests, reason="; ".join(reasons)[:500])
        return done, averaged, chunks

    async def _butterfly(
        self, t: int, roster: Roster, stage: int, phase: Phase, layout: Layout, vector: Tensor
    ) -> Butterfly:
        me = roster.index_of(self._me)
        assert me is not None
        parts = chunk_ranges(layout, phase, [1.0] * len(roster.members))
        butterfly = Butterfly(vector, parts, roster.weights, me, layout.group, self._codec)
        key = (t, roster.attempt, stage, phase, roster.key)
        try:
            await self.service.exchange(key, butterfly, roster.peers_of_stage(stage))
        except BaseException:
            self.service.exchanges.close(key)
            raise
        self._open.append(key)
        return butterfly

    async def _roll_call(self, t: int, attempt: int, offer: Offer, deadline: Deadline) -> CallReply:
        if self._lead is not None:
            return await self._lead.attend(t, attempt, offer, deadline)
        while True:
            question = self._ask_lead().rpc_call(Ask(t=t, attempt=attempt), timeout=self._patience_s)
            reply: CallReply = await question
            if reply.call or reply.over or reply.refused:
                return reply

    async def _decision(self, done: StageDone, deadline: Deadline) -> Decision:
        if self._lead is not None:
            self._lead.enter_digests(done)
            return await self._lead.decide(done.t, done.attempt, deadline)
        while True:
            decision: Decision = await self._ask_lead().rpc_stage_done(done, timeout=self._patience_s)
            if decision.outcome != "open":
                return decision

    async def _follow(self, t: int, deadline: Deadline, received: int) -> Outcome:
        started = time.monotonic()
        # Their deadline may have begun after ours.
        deadline = Deadline(max(deadline.remaining(), self._timeouts.round_s))
        if self._lead is not None:
            follow = await self._lead.follow(t, deadline)
        else:
            follow = Follow()
            while not follow.found and not follow.failed:
                follow = await self._ask_lead().rpc_follow(Ask(t=t), timeout=self._patience_s)
        if follow.failed:
            return Outcome(t, reason=follow.failed, failed=True)
        steps = []
        for result in follow.results:
            step, chunks = await self._fetch(result, follow.donor)
            self._remember(result, chunks)
            steps.append(step)
        traffic = self.service.traffic
        reason = "" if steps else "dropped by the clusters that were in it"
        return Outcome(t, steps, reason, time.monotonic() - started, 0, traffic.received - received)

    async def _fetch(
        self, result: Result, donor: list[RankAddress]
    ) -> tuple[OuterStep, dict[int, list[bytes]]]:
        """A committed round from a cluster that has it, checked against its digests."""
        averages, chunks = [], {}
        for stage, layout in self.layouts.items():
            peer = next((r.peer for r in donor if r.first_stage <= stage <= r.last_stage), self._lead_peer)
            chunks[stage] = await fetch_average(self.service, peer, result, stage, self._timeouts.round_s)
            shares = [1.0] * len(result.members)
            decode = partial(decode_average, self._outer, layout, chunks[stage], shares)
            averages.append(await self._compute(decode))
        digests = {int(s): d for s, d in result.stage_digests.items()}
        combined = combined_digest(digests)
        average = merged(averages)
        step = OuterStep(result.t, result.members, [], result.parent, combined, digests, average, None)
        return step, chunks

    def _keep(
        self,
        t: int,
        roster: Roster,
        digest: str,
        done: StageDone,
        average: Average,
        own: Average,
        chunks: dict[int, list[bytes]],
    ) -> OuterStep:
        parent = roster.members[0].lineage
        if self._lead is not None:
            stage_digests = {str(s): d for s, d in self._lead.digests_of(t, roster.attempt).items()}
            self._remember(
                Result(t=t, parent=parent, members=roster.ids, stage_digests=stage_digests), chunks
            )
        else:
            self._remember(None, chunks, t)
        digests = {int(s): d for s, d in done.digests.items()}
        return OuterStep(t, roster.ids, roster.weights, parent, digest, digests, average, own)

    def _remember(self, result: Result | None, chunks: dict[int, list[bytes]], t: int = 0) -> None:
        if result is not None:
            t = result.t
            self._results[t] = result
        self._chunks[t] = chunks
        sizes = {k: sum(len(c) for stage in kept.values() for c in stage) for k, kept in self._chunks.items()}
        while len(sizes) > 1 and (len(sizes) > _KEPT or sum(sizes.values()) > _KEPT_BYTES):
            old = min(sizes)
            del sizes[old], self._chunks[old]
            self._results.pop(old, None)

    @property
    def _patience_s(self) -> float:
        return self._timeouts.poll_s + self._timeouts.reply_s + 5.0

    def _ask_lead(self) -> Any:
        return self.service.stub(self._lead_peer)

    async def _compute(self, function: Callable[[], _T]) -> _T:
        return await self._loop.run_in_executor(self._codec, function)


def _who(error: BaseException, roster: Roster) -> str:
    return f"cluster {roster.ids[error.member]} " if isinstance(error, ContributionError) else ""
