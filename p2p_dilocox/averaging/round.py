"""The rounds of a rank: what the training loop starts, and picks up when it is over.

A round runs in the network thread: roll call, exchange of every stage the rank holds, votes; if a member is
lost, too slow or hostile, again without it while there is time. The training loop sees three things only:
start, ready, wait.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from p2p_dilocox.averaging.butterfly import Averaging
from p2p_dilocox.averaging.catchup import decode_average, fetch_average, read_result
from p2p_dilocox.averaging.coded import CodedStage, StageLayouts, coded_stages, merged
from p2p_dilocox.averaging.company import CALL_FAILED, Progress
from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.division import PHASES, Division
from p2p_dilocox.averaging.exchange import Budget, Exchange
from p2p_dilocox.averaging.fault import Aborted, MemberFault, forget_frames
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.averaging.lead import Lead
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.outcome import Outcome, OuterStep, Round
from p2p_dilocox.averaging.rollcall import Roster, read_call
from p2p_dilocox.averaging.service import ExchangeKey, Service
from p2p_dilocox.errors import ClusterError, DriftedError
from p2p_dilocox.fault_points import reach
from p2p_dilocox.lineage import part_digest, round_digest
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
from p2p_dilocox.swarm.patience import within

__all__ = ["Rounds"]

_ATTEMPTS = 4
_PAUSE_S = 0.5
_PACE_OF = 9  # committed rounds that say how long one usually takes
_USUAL = 4.0  # times the median of those
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Averaged:
    """What an attempt left us with. We keep it until we know whether it was committed."""

    average: Average
    own: Average
    chunks: dict[int, list[bytes]]
    seconds: float


class Rounds:
    """Starts rounds in `loop`. One at a time; `outer.residual`
    and `outer.basis` must not change while one runs.

    layouts: of every stage this rank holds. weight_cap: tokens that a cluster can train in one outer step.
    lead: set on rank 0 only; the others ask `lead_peer`.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        service: Service,
        outer: OuterState,
        layouts: dict[int, StageLayouts],
        me: str,
        lead: Lead | None,
        lead_peer: str,
        progress: Progress,
        timeouts: Timeouts,
        weight_cap: float,
        codec: ThreadPoolExecutor,
        kept: KeptRounds,
    ) -> None:
        self._loop, self.service, self._outer, self.layouts = loop, service, outer, layouts
        self._me, self._lead, self._lead_peer = me, lead, lead_peer
        self._progress, self._timeouts, self._codec = progress, timeouts, codec
        self._weight_cap = weight_cap
        self.kept = kept
        self._unkept: list[str] = []
        self._voted: dict[str, _Averaged] = {}  # by key of the roll call: we said yes, others perhaps no
        self._open: list[ExchangeKey] = []
        self._pace: deque[float] = deque(maxlen=_PACE_OF)

    def start(self, t: int, offer: Offer) -> Round:
        """Offer `outer.residual` to the round of outer step t."""
        deadline = Deadline(self._timeouts.round_s)
        self._progress.in_flight = t
        return self._launch(t, self._run(t, offer, deadline))

    def follow(self, t: int) -> Round:
        """Wait for the round of outer step t, which started before we were here."""
        deadline = Deadline(self._timeouts.round_s)
        self._progress.follows = t
        return self._launch(t, self._follow(t, deadline, self.service.traffic.received))

    def adopt(self, results: list[Result], donor: list[RankAddress], limit_s: float) -> Round:
        """Fetch rounds that were committed without us, one after the other from our lineage on. Their outcome
        is `failed` if the donor does not give them."""
        return self._launch(results[-1].call.t, self._adopt_all(results, donor), limit_s)

    async def _adopt_all(self, results: list[Result], donor: list[RankAddress]) -> Outcome:
        received = self.service.traffic.received
        steps = [await self._adopt(result, donor) for result in results]
        received = self.service.traffic.received - received
        return Outcome(results[-1].call.t, steps, received_bytes=received, notes=self._notes())

    def _launch(self, t: int, body: Coroutine[Any, Any, Outcome], limit_s: float | None = None) -> Round:
        limit_s = limit_s or 3 * self._timeouts.round_s

        async def bounded() -> Outcome:
            try:
                return await within(body, limit_s)  # each wait has its own limit; this one is the last
            except (ClusterError, *CALL_FAILED) as error:
                why = str(error) or f"{type(error).__name__} after {limit_s:.0f} s at most"
                refused, drifted = isinstance(error, ClusterError), isinstance(error, DriftedError)
                return Outcome(t, reason=why, failed=True, refused=refused, drifted=drifted)
            finally:
                self._progress.in_flight = self._progress.follows = 0

        return Round(t, asyncio.run_coroutine_threadsafe(bounded(), self._loop))

    async def _run(self, t: int, offer: Offer, deadline: Deadline) -> Outcome:
        started, traffic = time.monotonic(), self.service.traffic
        sent, received = traffic.sent, traffic.received
        coded = coded_stages(self._outer, self.layouts, t, offer.lowrank)
        # While others arrive:
        vectors = {s: asyncio.ensure_future(self._compute(c.vector_p)) for s, c in coded.items()}
        reason, attempt, steps = "no time for a roll call", 0, []
        self._voted.clear()
        while attempt < _ATTEMPTS and not deadline.passed:
            reach("roll_call", t)
            reply = await self._roll_call(t, attempt, offer, deadline)
            if reply.over:
                return await self._follow(t, deadline, received)
            if reply.call is None:
                reason = reply.dropped or reply.refused or "no roll call in time"
                break
            roster = read_call(reply.call, self.service.node.run_id, self.service.gate, self._weight_cap)
            if roster.index_of(self._me) is None:
                return await self._follow(t, deadline, received)
            for stage, code in coded_stages(self._outer, self.layouts, t, roster.lowrank).items():
                if code.layout.lowrank != coded[stage].layout.lowrank:  # the others want another rank
                    coded[stage], _ = code, await vectors[stage]
                    vectors[stage] = asyncio.ensure_future(self._compute(code.vector_p))
            done, averaged = await self._average(t, roster, coded, vectors, deadline)
            reach("averaged", t)
            decision = await self._decision(done, deadline)
            while self._open:  # a member that comes late must not wait for us
                self.service.close_exchange(self._open.pop())
            attempt += 1
            if decision.outcome == "committed" and averaged is not None:
                reach("committed", t)
                self._pace.append(averaged.seconds)
                steps = [await self._keep(roster, decision.digest, done, averaged)]
                break
            reason = decision.reason or done.reason
            await deadline.sleep(_PAUSE_S)  # for whoever is gone to be seen as gone
        await asyncio.gather(*vectors.values())  # the residual may change once we return
        traffic.measure()
        return Outcome(
            t, steps, "" if steps else reason, time.monotonic() - started, traffic.sent - sent,
            traffic.received - received, attempt, notes=self._notes(),
        )  # fmt: skip

    async def _average(
        self,
        t: int,
        roster: Roster,
        coded: dict[int, CodedStage],
        vectors: "Mapping[int, asyncio.Future[Tensor]]",
        deadline: Deadline,
    ) -> tuple[StageDone, _Averaged | None]:
        """Average every stage we hold with the roster's members. A stage that fails has "" for a digest."""
        started = time.monotonic()
        digests: dict[str, str] = {}
        reasons: list[str] = []
        accused: dict[str, str] = {}
        gone: dict[str, str] = {}
        suspects: list[str] = []
        parts: dict[str, list[str]] = {}
        averages: dict[int, tuple[Average, Average]] = {}
        chunks: dict[int, list[bytes]] = {}
        budget = self._budget(deadline.within(roster.remaining_s))

        async def one(stage: int) -> None:
            code = coded[stage]
            try:
                p, q = await self._exchange(t, roster, stage, code, vectors[stage], budget)
            except MemberFault as fault:
                forget_frames(fault)
                digests[str(stage)] = ""
                (gone if fault.gone else accused)[roster.ids[fault.member]] = str(fault)[:500]
                return
            except (Aborted, *CALL_FAILED) as error:
                forget_frames(error)
                suspect = getattr(error, "suspect", None)
                suspects.extend([] if suspect is None else [roster.ids[suspect]])
                digests[str(stage)] = ""
                reasons.append(f"stage {stage}: {str(error) or 'out of time'}")
                return
            averages[stage] = (code.decode(p.average, q.average), code.decode(p.own, q.own))
            chunks[stage] = [data for part in (*p.chunks, *q.chunks) for data in part]
            by_owner = list(zip(p.chunks, q.chunks, strict=False))
            parts[str(stage)] = await self._compute(lambda: [part_digest((*a, *b)) for a, b in by_owner])
            digests[str(stage)] = await self._compute(lambda: round_digest(chunks[stage]))

        await asyncio.gather(*(one(stage) for stage in coded))
        done = StageDone(
            t=t,
            attempt=roster.attempt,
            digests=digests,
            reason="; ".join(reasons)[:500],
            accused=accused,
            gone=gone,
            suspects=suspects,
            parts=parts,
        )
        if len(averages) < len(coded):
            return done, None
        average, own = merged([a for a, _ in averages.values()]), merged([o for _, o in averages.values()])
        averaged = _Averaged(average, own, chunks, time.monotonic() - started)
        self._voted[roster.key] = averaged
        return done, averaged

    async def _exchange(
        self,
        t: int,
        roster: Roster,
        stage: int,
        code: CodedStage,
        vector_p: "asyncio.Future[Tensor]",
        budget: Budget,
    ) -> tuple[Averaging, Averaging]:
        """Both phases of one stage. The second vector is computed while the streams stay open."""
        me = roster.index_of(self._me)
        assert me is not None
        division = Division(code.layout, roster, self._outer.spec.compression.gather_up_to)
        p, q = (division.averaging(phase, me, self._codec) for phase in PHASES)
        key = (t, roster.attempt, stage, roster.key)
        exchange = Exchange(
            (p, q), roster.peers_of_stage(stage), roster.dials(me), partial(self.service.dial_exchange, key),
            self.service.traffic, budget,
        )  # fmt: skip
        self.service.open_exchange(key, exchange)
        self._open.append(key)

        async def vectors() -> None:
            p.set_vector(await asyncio.shield(vector_p))
            await p.complete.wait()
            q.set_vector(await self._compute(lambda: code.vector_q(p.average)))

        ours = asyncio.create_task(vectors())
        try:
            run = asyncio.create_task(exchange.run())
            await asyncio.wait({ours, run}, return_when=asyncio.FIRST_EXCEPTION)
            if ours.done() and not run.done():
                ours.result()
            await run
        except BaseException:
            p.close()
            q.close()
            raise
        finally:
            for task in (ours, run):
                task.cancel()
            await asyncio.gather(ours, run, return_exceptions=True)
        return p, q

    def _budget(self, remaining_s: float) -> Budget:
        """A round is over when it usually is, or there is somebody to blame; a quarter of the deadline it
        always has.
        """
        timeouts = self._timeouts
        limit_s = max(0.1, remaining_s - timeouts.closing_s)
        usual_s = 0.6 * limit_s
        if len(self._pace) >= 3:
            usual_s = min(usual_s, max(_USUAL * statistics.median(self._pace), 0.25 * timeouts.round_s))
        return Budget(usual_s, limit_s, timeouts.reply_s)

    async def _roll_call(self, t: int, attempt: int, offer: Offer, deadline: Deadline) -> CallReply:
        if self._lead is not None:
            return await self._lead.attend(t, attempt, offer, deadline)
        while True:
            question = self._ask_lead().rpc_call(Ask(t=t, attempt=attempt), timeout=self._patience_s)
            reply: CallReply = await question
            if reply.call or reply.over or reply.dropped or reply.refused:
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
            return Outcome(t, reason=follow.failed, failed=True, notes=self._notes())
        steps = []
        for result in follow.results:
            steps.append(await self._adopt(result, follow.donor))
        traffic = self.service.traffic
        reason = "" if steps else "dropped by the clusters that were in it"
        return Outcome(
            t, steps, reason, time.monotonic() - started, 0, traffic.received - received, notes=self._notes()
        )

    async def _adopt(self, result: Result, donor: list[RankAddress]) -> OuterStep:
        """A round that was committed without our knowing: as we averaged it ourselves, or from a cluster that
        has it.
        """
        proven = read_result(result, self.service.node.run_id, self.service.gate, self._weight_cap)
        roster, voted = proven.roster, self._voted.get(proven.roster.key)
        if voted and any(round_digest(chunks) != proven.digests[s] for s, chunks in voted.chunks.items()):
            voted = None
        if voted is not None:
            await self._remember(roster.t, result, voted.chunks)
            return self._step(roster, proven.digest, proven.digests, voted.average, voted.own)
        averages, chunks = [], {}
        for stage, layouts in self.layouts.items():
            layout = layouts.at(roster.t, *roster.lowrank[stage : stage + 1])
            division = Division(layout, roster, self._outer.spec.compression.gather_up_to)
            kept = await asyncio.to_thread(self.kept.verified, roster.t, stage, proven.digests[stage])
            chunks[stage] = kept or await fetch_average(self.service, donor, result, stage, division)
            averages.append(
                await self._compute(partial(decode_average, self._outer, division, chunks[stage]))
            )
        await self._remember(roster.t, result, chunks)
        return self._step(roster, proven.digest, proven.digests, merged(averages), None)

    async def _keep(self, roster: Roster, digest: str, done: StageDone, averaged: _Averaged) -> OuterStep:
        result = self._lead.result_of(roster.t, roster.attempt) if self._lead is not None else None
        await self._remember(roster.t, result, averaged.chunks)
        digests = {int(s): d for s, d in done.digests.items()}
        return self._step(roster, digest, digests, averaged.average, averaged.own)

    def _step(
        self, roster: Roster, digest: str, digests: dict[int, str], average: Average, own: Average | None
    ) -> OuterStep:
        return OuterStep(
            roster.t, roster.ids, roster.weights, roster.parent, digest, digests, average, own, roster.norms,
            self._weight_cap, roster.lowrank, roster.H,
        )  # fmt: skip

    def _notes(self) -> list[str]:
        notes, self._unkept = self._unkept, []
        return notes + (self._lead.notes() if self._lead is not None else [])

    async def _remember(self, t: int, result: Result | None, chunks: dict[int, list[bytes]]) -> None:
        """Before the training loop hears of it: what is committed survives us."""
        try:
            await asyncio.to_thread(self.kept.remember, t, result, chunks)
        except OSError as error:
            self._unkept.append(f"the round of outer step {t} is not on disk: {error.strerror}")

    @property
    def _patience_s(self) -> float:
        return self._timeouts.poll_s + self._timeouts.reply_s + 5.0

    def _ask_lead(self) -> Any:
        return self.service.stub(self._lead_peer)

    async def _compute(self, function: Callable[[], _T]) -> _T:
        return await self._loop.run_in_executor(self._codec, function)
