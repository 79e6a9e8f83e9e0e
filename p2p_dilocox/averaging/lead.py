"""What a cluster's lead (rank 0) does for its cluster: roll call, votes, and the word to its own ranks."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from p2p_dilocox.averaging.company import Company
from p2p_dilocox.averaging.deadlines import Deadline
from p2p_dilocox.averaging.exclusion import Grudges, NormCap, to_blame
from p2p_dilocox.averaging.offer import Offer
from p2p_dilocox.averaging.rollcall import RollCalls, Roster, coordinator_order, read_call
from p2p_dilocox.averaging.vote import Ballot, over_all_stages
from p2p_dilocox.errors import ClusterError, DriftedError, NotTrustedError
from p2p_dilocox.lineage import combined_digest
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
    StateOffer,
    Vote,
    Votes,
    open_sealed,
    seal,
)  # fmt: skip
from p2p_dilocox.swarm.patience import within

__all__ = ["Lead"]

_MOST_AT_ONCE = 16  # rounds to catch up with: their averages are in memory until all are applied
_BALLOTS_AHEAD = 3  # a cluster in step is never further ahead than the round in flight
_MOST_ATTEMPTS = 16
_SILENT = 2  # looks at which nobody answers who can be in a round
_SURELY_REFUSED = 3
_KEPT = 8  # outer steps whose attempts we remember
_LOG = logging.getLogger(__name__)


@dataclass
class _Attempt:
    """One attempt of our cluster in outer step t, from its roll call to the votes."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    reply: CallReply | None = None
    roster: Roster | None = None
    digests: dict[int, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    accused: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    parts: dict[int, list[str]] = field(default_factory=dict)
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
        quorum: int,
        result_after: Callable[[int], Result],
        offer: Callable[[], StateOffer],
    ) -> None:
        """min_clusters: for the first outer step. result_after(t), offer: of what we keep on disk."""
        self.company, self.gate = company, company.gate
        self.me, self.run_id = company.me, company.node.run_id
        self.timeouts, self.progress = company.timeouts, company.progress
        self.spec_digest, self.num_stages = spec_digest, num_stages
        self.result_after, self.offer = result_after, offer
        self.weight_cap, self.norm_cap, self.grudges = company.weight_cap, NormCap(), Grudges()
        self.rollcalls = RollCalls(
            me=self.me,
            run_id=self.run_id,
            spec_digest=spec_digest,
            timeouts=self.timeouts,
            coordinators=company.coordinators,
            expected=company.expected,
            standing_of=company.standing_of,
            parent_of=company.parent_of,
            min_clusters=lambda: 1 if self.progress.members else min_clusters,
            quorum=quorum,
            gate=self.gate,
            norm_cap=self.norm_cap.cap,
            weight_cap=self.weight_cap,
        )
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._ballots: dict[tuple[int, int], Ballot] = {}
        self._followed: dict[int, asyncio.Future[Follow]] = {}
        self._notes: list[str] = []
        self._refusals: list[str] = []  # the coordinators that have, since our last committed round

    async def close(self) -> None:
        await self.rollcalls.close()
        await self.company.close()

    # --- our cluster in a round

    async def attend(self, t: int, attempt: int, offer: Offer, deadline: Deadline) -> CallReply:
        """Answer the roll call; the reply is a call (perhaps without us), `over`, `dropped`, or empty if
        there is none in time.

        Raises ClusterError if the coordinator refuses us: another protocol or run spec; DriftedError if our
        anchor is another one.
        """
        ready = Ready(
            spec=self.spec_digest, cluster_id=self.me, name=self.company.name, t=t, attempt=attempt,
            lineage=self.progress.lineage, weight=offer.weight, norm=offer.norm,
            fingerprint=list(offer.fingerprint), lowrank=list(offer.lowrank), H=offer.H,
            uplink_mbps=self.company.uplink_mbps(), without=self.grudges.without(t), ranks=self.company.ranks,
        )  # fmt: skip
        sealed = seal(self.company.key, self.run_id, ready)
        reply = CallReply()
        silence = Deadline(deadline.within(self.timeouts.roll_call_s))  # no roll call is open for longer
        while not silence.passed:
            for coordinator in coordinator_order(self.company.coordinators(), t, attempt):
                if coordinator in ready.without:
                    continue
                answer = await self._offer(coordinator, sealed)
                if answer is None:
                    continue
                silence = Deadline(deadline.within(self.timeouts.roll_call_s))
                if answer.redirect and answer.redirect != coordinator:
                    answer = await self._offer(answer.redirect, sealed) or CallReply()
                if answer.refused or answer.drifted:
                    answer = self._sent_away(t, attempt, coordinator, answer)
                reply = answer
                break
            if reply.call or reply.over or reply.dropped:
                break
            await deadline.sleep(0.05)
        entry = self._attempt(t, attempt)
        if reply.call:
            entry.roster = read_call(reply.call, self.run_id, self.gate, self.weight_cap)
            for member in entry.roster.members:
                await self.company.meet(member.cluster_id, member.ranks)
            cap = self.norm_cap.cap([m.norm for m in entry.roster.members if m.weight > 0])
            for member in entry.roster.members:
                if member.norm > cap:
                    entry.accused[member.cluster_id] = (
                        f"announced a norm of {member.norm:.4g}, usual is {cap:.4g} at most"
                    )
        if reply.left_out:
            self._note(f"outer step {t} went on without this cluster: {reply.left_out}")
        entry.reply = reply
        entry.ready.set()
        return reply

    async def decide(self, t: int, attempt: int, deadline: Deadline) -> Decision:
        """Wait for our ranks' digests, vote for the cluster, and make the outcome known to our ranks."""
        entry = self._attempt(t, attempt)
        roster = entry.roster
        if roster is None:
            raise ClusterError(f"no roll call for outer step {t}, attempt {attempt}: nothing to vote on")
        try:
            await within(entry.complete.wait(), max(0.01, deadline.remaining()))
            digest = combined_digest(entry.digests)
        except TimeoutError:
            digest = ""
            entry.reasons.append("a stage of this cluster was not averaged before the deadline")
        for cluster, why in entry.gone.items():
            # One that ends an averaging closes its streams: who still answers is not to blame.
            if await self.company.standing_of(cluster) is None:
                entry.accused[cluster] = why
            else:
                entry.reasons.append(f"lost the connection to cluster {cluster}: {why}")
        if entry.accused:
            digest = ""
            entry.reasons += [f"cluster {c} {why}" for c, why in entry.accused.items()]
        reason = "; ".join(dict.fromkeys(entry.reasons))[:500]
        vote = Vote(
            cluster_id=self.me, t=t, attempt=attempt, call=roster.key, digest=digest, reason=reason,
            accused=list(entry.accused), parts=over_all_stages(entry.parts) if digest else [],
        )  # fmt: skip
        ballot = self._ballot(t, attempt)
        outcome = await ballot.decide(
            seal(self.company.key, self.run_id, vote), roster.ids, roster.teller, roster.clients, self._tell,
            self.timeouts, Deadline(deadline.within(self.timeouts.votes_s)),
        )  # fmt: skip
        if outcome == "committed":
            self._refusals.clear()
            self.grudges.forgive(roster.ids)
            self.norm_cap.remember([m.norm for m in roster.members if m.weight > 0])
        else:
            self._blame(t, entry, ballot)
        decision = Decision(
            outcome=outcome, digest=digest if outcome == "committed" else "", reason=ballot.reason[:500]
        )
        entry.decision.set_result(decision)
        self._forget(t)
        return decision

    def notes(self) -> list[str]:
        """Sentences about who was left out and why, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def result_of(self, t: int, attempt: int) -> Result:
        """The proof of a round that we committed."""
        entry, ballot = self._attempt(t, attempt), self._ballot(t, attempt)
        assert entry.reply is not None and entry.reply.call is not None
        digests = {str(stage): digest for stage, digest in sorted(entry.digests.items())}
        return Result(call=entry.reply.call, stage_digests=digests, votes=ballot.proof())

    def follow(self, t: int, deadline: Deadline) -> "asyncio.Future[Follow]":
        """Find the committed rounds from ours on, up to outer step t
        at least, which goes on without us, at a cluster that has them."""
        if t not in self._followed:
            self._followed[t] = asyncio.ensure_future(self._follow(t, deadline))
        return self._followed[t]

    async def _follow(self, t: int, deadline: Deadline) -> Follow:
        why, silent = "", 0
        while not deadline.passed and silent < _SILENT:
            silent += 1
            for cluster in self.company.others():
                standing = await self.company.standing_of(cluster)
                if standing is None or standing.t < t:
                    if standing is not None and standing.t == t - 1 and cluster in self.company.present:
                        silent = 0
                    continue
                ours = self.progress.committed_t, self.progress.lineage
                try:
                    results = await self.company.results_from(
                        cluster, *ours, standing.committed_t, _MOST_AT_ONCE
                    )
                except NotTrustedError as error:
                    why = str(error)
                    continue
                return Follow(results=results, donor=self.company.ranks_of(cluster), found=True)
            if why:
                return Follow(failed=why)
            await deadline.sleep(self.timeouts.poll_s)
        return Follow(failed=f"nobody committed outer step {t} in time, or answers who did")

    # --- service.Desk

    async def on_hello(self, sealed: bytes, peer: str) -> Standing:
        presence = open_sealed(sealed, self.run_id, Presence)
        self.gate.require(presence.cluster_id)
        if presence.lead.peer != peer:  # else who overheard a goodbye could say it again
            raise NotTrustedError(f"{peer} tells the presence of another peer")
        stranger = presence.state == "archive" or presence.cluster_id == self.me
        if not stranger and not await self.company.greeted(presence):
            self.rollcalls.forget(presence.cluster_id)
        return self.company.standing()

    async def on_ready(self, sealed: bytes) -> CallReply:
        cluster = open_sealed(sealed, self.run_id, Ready).cluster_id
        self.company.heard(cluster)
        self.company.back(cluster)
        return await self.rollcalls.answer(sealed, last_t=self.progress.t)

    async def on_call(self, ask: Ask) -> CallReply:
        entry = self._attempt(ask.t, ask.attempt)
        try:
            await within(entry.ready.wait(), self.timeouts.poll_s)
        except TimeoutError:
            return CallReply()
        reply = entry.reply or CallReply()
        # "none in time" must not look like "not yet"
        found = reply.call or reply.over or reply.dropped or reply.refused
        return reply if found else CallReply(refused="no roll call in time")

    async def on_stage_done(self, done: StageDone) -> Decision:
        entry = self._attempt(done.t, done.attempt)
        self.enter_digests(done)
        await asyncio.wait({entry.decision}, timeout=self.timeouts.poll_s)
        return entry.decision.result() if entry.decision.done() else Decision(outcome="open")

    def enter_digests(self, done: StageDone) -> None:
        entry = self._attempt(done.t, done.attempt)
        entry.digests.update({int(stage): digest for stage, digest in done.digests.items()})
        entry.accused |= done.accused
        entry.gone |= done.gone
        entry.parts.update({int(stage): parts for stage, parts in done.parts.items()})
        for cluster in (*done.accused, *done.suspects):
            self.company.doubt(cluster)
        if done.reason and done.reason not in entry.reasons:
            entry.reasons.append(done.reason)
        if len(entry.digests) == self.num_stages or not all(entry.digests.values()):
            entry.complete.set()

    async def on_votes(self, votes: Votes, cluster: str) -> Votes:
        if abs(votes.t - self.progress.t) > _BALLOTS_AHEAD or votes.attempt >= _MOST_ATTEMPTS:
            raise NotTrustedError(f"votes on outer step {votes.t}, we are at {self.progress.t}")
        ballot = self._ballot(votes.t, votes.attempt)
        ballot.merge(cluster, votes)
        await ballot.settled(self.timeouts.poll_s)
        return ballot.message()

    def heard(self, cluster: str) -> None:
        self.company.heard(cluster)

    async def on_standing(self) -> Standing:
        return self.company.standing()

    async def on_result(self, ask: Ask) -> Result:
        return self.result_after(ask.t)

    async def on_state(self) -> StateOffer:
        return await asyncio.to_thread(self.offer)

    async def on_follow(self, ask: Ask) -> Follow:
        following = self._followed.get(ask.t)
        if following is None:
            raise NotTrustedError(f"this cluster does not follow outer step {ask.t}")
        await asyncio.wait({following}, timeout=self.timeouts.poll_s)
        return following.result() if following.done() else Follow()

    # ---

    def _sent_away(self, t: int, attempt: int, coordinator: str, answer: CallReply) -> CallReply:
        """A coordinator refuses us. The word of one costs us the round; of two, of the only other, or three
        times running, ends us.
        """
        why = answer.refused or "the parameters are not those of the other clusters"
        self._refusals.append(coordinator)
        others = [c for c in self.company.coordinators() if c != self.me]
        enough = len(set(self._refusals)) >= min(2, len(others)) or len(self._refusals) >= _SURELY_REFUSED
        if coordinator != self.me and not enough:
            self._note(f"outer step {t} goes on without this cluster: {coordinator} refuses it: {why}")
            return CallReply(over=True)
        entry = self._attempt(t, attempt)
        entry.reply = CallReply(refused=why)  # for our other ranks
        entry.ready.set()
        raise (DriftedError if answer.drifted else ClusterError)(f"cluster {coordinator} refuses ours: {why}")

    def _blame(self, t: int, entry: _Attempt, ballot: Ballot) -> None:
        blamed = to_blame(self.me, ballot.members, ballot.votes, ballot.forgers, entry.accused)
        for cluster, why in blamed.items():
            self.grudges.strike(cluster, t)
            until = self.grudges.until(cluster)
            more = f" and up to outer step {until}" if until > t else ""
            self._note(f"cluster {cluster} is left out of outer step {t}{more}: {why}")

    def _note(self, sentence: str) -> None:
        _LOG.warning(sentence)
        self._notes.append(sentence)

    async def _offer(self, coordinator: str, sealed: bytes) -> CallReply | None:
        if coordinator == self.me:
            return await self.on_ready(sealed)
        patience_s = self.timeouts.poll_s + self.timeouts.reply_s
        envelope = Envelope(body=sealed)
        return await self.company.ask(coordinator, lambda stub: stub.rpc_ready(envelope, timeout=patience_s))

    async def _tell(self, member: str, votes: Votes) -> Votes | None:
        shown = msgspec.structs.replace(votes, shown=self.gate.own)
        return await self.company.ask(
            member, lambda stub: stub.rpc_votes(shown, timeout=self.timeouts.reply_s)
        )

    def _attempt(self, t: int, attempt: int) -> _Attempt:
        return self._attempts.setdefault((t, attempt), _Attempt())

    def _ballot(self, t: int, attempt: int) -> Ballot:
        return self._ballots.setdefault((t, attempt), Ballot(t, attempt, self.me, self.run_id))

    def _forget(self, t: int) -> None:
        for table in (self._attempts, self._ballots):
            for key in [k for k in table if k[0] < t - _KEPT]:
                del table[key]
        self._followed = {k: f for k, f in self._followed.items() if k >= t - _KEPT}
