"""What a cluster's lead (rank 0) does for its cluster: roll call, votes, and the word to its own ranks."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dilocox.averaging.company import Company
from p2p_dilocox.averaging.deadlines import Deadline
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.rollcall import RollCalls, Roster, coordinator_order, read_call
from p2p_dilocox.averaging.vote import Ballot
from p2p_dilocox.errors import ClusterError, NotTrustedError
from p2p_dilocox.lineage import combined_digest, next_lineage
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Decision,
    Envelope,
    Follow,
    Presence,
    Ready,
    Result,
    StageDone,
    Standing,
    Votes,
    open_sealed,
    seal,
)  # fmt: skip

__all__ = ["Lead"]

_MOST_AT_ONCE = 64
_BALLOTS_AHEAD = 3  # a cluster in step is never further ahead than the round in flight


@dataclass
class _Attempt:
    """One attempt of our cluster in outer step t, from its roll call to the votes."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    reply: CallReply | None = None
    roster: Roster | None = None
    digests: dict[int, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    decision: asyncio.Future[Decision] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Lead:
    """Implements service.Desk. All of it runs in the network thread's event loop."""

    def __init__(
        self,
        company: Company,
        *,
        spec_digest: str,
        num_stages: int,
        min_clusters: int,
        result_after: Callable[[int], Result],
    ) -> None:
        """min_clusters: for the first outer step. result_after(t): a committed round that we keep."""
        self.company = company
        self.me, self.run_id = company.me, company.node.run_id
        self.timeouts, self.progress = company.timeouts, company.progress
        self.spec_digest, self.num_stages, self.result_after = spec_digest, num_stages, result_after
        self.rollcalls = RollCalls(
            me=self.me,
            run_id=self.run_id,
            spec_digest=spec_digest,
            timeouts=self.timeouts,
            coordinators=company.coordinators,
            expected=company.expected,
            standing_of=company.standing_of,
            min_clusters=lambda: 1 if self.progress.members else min_clusters,
        )
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._ballots: dict[tuple[int, int], Ballot] = {}
        self._followed: dict[int, asyncio.Future[Follow]] = {}

    async def close(self) -> None:
        await self.rollcalls.close()
        await self.company.close()

    # --- our cluster in a round

    async def attend(self, t: int, attempt: int, offer: Offer, deadline: Deadline) -> CallReply:
        """Answer the roll call; the reply is a call (perhaps without
        us), `over`, or empty if there is none in time.

        Raises ClusterError if the coordinator refuses us: another protocol or run spec.
        """
        ready = Ready(
            spec=self.spec_digest, cluster_id=self.me, name=self.company.name, t=t, attempt=attempt,
            lineage=self.progress.lineage, weight=offer.weight, ranks=self.company.ranks,
        )  # fmt: skip
        sealed = seal(self.company.key, self.run_id, ready)
        reply = CallReply()
        while not deadline.passed:
            for coordinator in coordinator_order(self.company.coordinators(), t):
                answer = await self._offer(coordinator, sealed)
                if answer is None:
                    continue
                if answer.redirect and answer.redirect != coordinator:
                    answer = await self._offer(answer.redirect, sealed) or CallReply()
                if answer.refused:
                    raise ClusterError(f"cluster {coordinator} refuses ours: {answer.refused}")
                reply = answer
                break
            if reply.call or reply.over:
                break
            await deadline.sleep(0.05)
        entry = self._attempt(t, attempt)
        if reply.call:
            entry.roster = read_call(reply.call, self.run_id)
            for member in entry.roster.members:
                await self.company.meet(member.cluster_id, member.ranks)
        entry.reply = reply
        entry.ready.set()
        return reply

    async def decide(self, t: int, attempt: int, deadline: Deadline) -> Decision:
        """Wait for our ranks' digests, vote for the cluster, and make the outcome known to our ranks."""
        entry = self._attempt(t, attempt)
        if entry.roster is None:
            raise ClusterError(f"no roll call for outer step {t}, attempt {attempt}: nothing to vote on")
        try:
            await asyncio.wait_for(entry.complete.wait(), max(0.01, deadline.remaining()))
            digest = combined_digest(entry.digests)
        except TimeoutError:
            digest = ""
            entry.reasons.append("a stage of this cluster was not averaged before the deadline")
        ballot = self._ballot(t, attempt)
        outcome = await ballot.decide(digest, entry.roster.ids, self._tell, self.timeouts, deadline)
        reason = "; ".join(dict.fromkeys([ballot.reason, *entry.reasons]))[:500]
        decision = Decision(outcome=outcome, digest=digest if outcome == "committed" else "", reason=reason)
        entry.decision.set_result(decision)
        self._forget(t)
        return decision

    def follow(self, t: int, deadline: Deadline) -> "asyncio.Future[Follow]":
        """Find the committed rounds from ours on, up to outer step t
        at least, which goes on without us, at a cluster that has them."""
        if t not in self._followed:
            self._followed[t] = asyncio.ensure_future(self._follow(t, deadline))
        return self._followed[t]

    async def _follow(self, t: int, deadline: Deadline) -> Follow:
        while not deadline.passed:
            for cluster in self.company.others():
                standing = await self.company.standing_of(cluster)
                if standing is None or standing.t < t:
                    continue
                results: list[Result] = []
                at, parent = self.progress.committed_t, self.progress.lineage
                while at < standing.committed_t and len(results) < _MOST_AT_ONCE:
                    result = await self.company.result_after(cluster, at)
                    if result is None or result.t <= at or result.parent != parent:
                        return Follow(
                            failed=f"cluster {cluster} cannot tell the round after our outer step {at}"
                        )
                    digests = {int(stage): digest for stage, digest in result.stage_digests.items()}
                    parent = next_lineage(parent, result.t, result.members, combined_digest(digests))
                    at = result.t
                    results.append(result)
                return Follow(results=results, donor=self.company.ranks_of(cluster), found=True)
            await deadline.sleep(self.timeouts.poll_s)
        return Follow(failed=f"nobody committed outer step {t} in time")

    # --- service.Desk

    async def on_hello(self, sealed: bytes) -> Standing:
        presence = open_sealed(sealed, self.run_id, Presence)
        if presence.cluster_id != self.me:
            self.company.present[presence.cluster_id] = presence
            await self.company.meet(presence.cluster_id, presence.ranks)
        return self.company.standing()

    async def on_ready(self, sealed: bytes) -> CallReply:
        return await self.rollcalls.answer(sealed, last_t=self.progress.t)

    async def on_call(self, ask: Ask, peer: str) -> CallReply:
        self._require_own(peer)
        entry = self._attempt(ask.t, ask.attempt)
        try:
            await asyncio.wait_for(entry.ready.wait(), self.timeouts.poll_s)
        except TimeoutError:
            return CallReply()
        reply = entry.reply or CallReply()
        # "none in time" must not look like "not yet"
        return reply if reply.call or reply.over else CallReply(refused="no roll call in time")

    async def on_stage_done(self, done: StageDone, peer: str) -> Decision:
        self._require_own(peer)
        entry = self._attempt(done.t, done.attempt)
        self.enter_digests(done)
        await asyncio.wait({entry.decision}, timeout=self.timeouts.poll_s)
        return entry.decision.result() if entry.decision.done() else Decision(outcome="open")

    def enter_digests(self, done: StageDone) -> None:
        entry = self._attempt(done.t, done.attempt)
        entry.digests.update({int(stage): digest for stage, digest in done.digests.items()})
        if done.reason and done.reason not in entry.reasons:
            entry.reasons.append(done.reason)
        if len(entry.digests) == self.num_stages or not all(entry.digests.values()):
            entry.complete.set()

    def digests_of(self, t: int, attempt: int) -> dict[int, str]:
        return dict(sorted(self._attempt(t, attempt).digests.items()))

    async def on_votes(self, votes: Votes, peer: str) -> Votes:
        ballot = self._ballot(votes.t, votes.attempt)
        sender = self.company.cluster_led_by(peer)
        if sender is None:
            raise NotTrustedError(f"{peer} leads no cluster of this run")
        if abs(votes.t - self.progress.t) > _BALLOTS_AHEAD:
            raise NotTrustedError(f"votes on outer step {votes.t}, we are at {self.progress.t}")
        ballot.merge(sender, votes)
        return ballot.message()

    async def on_standing(self) -> Standing:
        return self.company.standing()

    async def on_result(self, ask: Ask) -> Result:
        return self.result_after(ask.t)

    async def on_follow(self, ask: Ask, peer: str) -> Follow:
        self._require_own(peer)
        following = self._followed.get(ask.t)
        if following is None:
            raise NotTrustedError(f"this cluster does not follow outer step {ask.t}")
        await asyncio.wait({following}, timeout=self.timeouts.poll_s)
        return following.result() if following.done() else Follow()

    # ---

    async def _offer(self, coordinator: str, sealed: bytes) -> CallReply | None:
        if coordinator == self.me:
            return await self.on_ready(sealed)
        patience_s = self.timeouts.poll_s + self.timeouts.reply_s
        envelope = Envelope(body=sealed)
        return await self.company.ask(coordinator, lambda stub: stub.rpc_ready(envelope, timeout=patience_s))

    async def _tell(self, member: str, votes: Votes) -> Votes | None:
        return await self.company.ask(
            member, lambda stub: stub.rpc_votes(votes, timeout=self.timeouts.reply_s)
        )

    def _require_own(self, peer: str) -> None:
        if peer not in {r.peer for r in self.company.ranks}:
            raise NotTrustedError(f"{peer} is no rank of cluster {self.me}")

    def _attempt(self, t: int, attempt: int) -> _Attempt:
        return self._attempts.setdefault((t, attempt), _Attempt())

    def _ballot(self, t: int, attempt: int) -> Ballot:
        return self._ballots.setdefault((t, attempt), Ballot(t, attempt, self.me))

    def _forget(self, t: int) -> None:
        for table in (self._attempts, self._ballots):
            for key in [k for k in table if k[0] < t - 8]:
                del table[key]
