"""Votes on a round: it is committed by every member or by none (rule V2).

Each member signs one vote per attempt: the digest over all its stages' averages, or "" for no. One member,
the teller, collects them and tells everyone; if it is lost, the members tell each other. Votes are signed, so
that nobody can invent those of others, and all of them together are the proof of a commit that anyone can
check later.

A member commits once it has an equal vote of every member and knows of another one that has them too. So
after the death of any one member, each commit that it can have made is known to one that is alive; a vote
that is nowhere was not cast in time, and the rest abort. Who aborted for want of a vote and meets the proof
of the commit later adopts it.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterable

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.lineage import part_digest
from p2p_dilocox.swarm.messages import Outcome, Vote, Votes, open_sealed
from p2p_dilocox.swarm.patience import within

__all__ = ["Ballot", "check_votes", "over_all_stages"]

_AGAIN_S = 0.1
_LOST_AFTER = 3  # calls in a row that fail at once before a member counts as lost
_MOST_VOTES = 256


class Ballot:
    """The votes on one attempt of one outer step, as one member knows them."""

    def __init__(self, t: int, attempt: int, me: str, run_id: str) -> None:
        self.t, self.attempt, self.me, self._run_id = t, attempt, me, run_id
        self.outcome: Outcome = "open"
        self.reason = ""
        self.members: list[str] = []  # known once we vote
        self._call = ""
        self._sealed: dict[bytes, Vote] = {}
        self._gave_up: set[str] = set()
        self._told: dict[str, set[str]] = {}  # who has told us which members' votes
        self.forgers: dict[str, str] = {}  # who has told us votes that others did not sign
        self._lost: set[str] = set()
        self._heard: set[str] = set()  # who has answered us since we vote
        self._frozen_s = 0.0
        self._changed, self._settled = asyncio.Event(), asyncio.Event()

    @property
    def votes(self) -> dict[str, Vote]:
        """By member. Of two different votes of one member the "no" counts, so that nobody gains by it."""
        votes: dict[str, Vote] = {}
        for vote in self._sealed.values():
            if vote.cluster_id not in votes or not vote.digest:
                votes[vote.cluster_id] = vote
        return votes

    @property
    def complete(self) -> bool:
        """Whether every member voted yes, for the same average of the same member list."""
        votes = self.votes
        return (
            bool(self.members) and all(m in votes and votes[m].digest for m in self.members) and self._agree()
        )

    def message(self) -> Votes:
        return Votes(t=self.t, attempt=self.attempt, votes=list(self._sealed), outcome=self.outcome)

    def proof(self) -> list[bytes]:
        """The sealed votes of all members, in their order."""
        return [next(s for s, vote in self._sealed.items() if vote.cluster_id == m) for m in self.members]

    def merge(self, sender: str, told: Votes) -> None:
        """Learn what `sender` knows. Raises NotTrustedError for a vote that its cluster did not sign."""
        forged: NotTrustedError | None = None
        for sealed in told.votes:
            try:
                self._enter(sealed, sender)
            except NotTrustedError as error:
                self.forgers[sender], forged = str(error), error
        self._told.setdefault(sender, set()).update(
            self._sealed[s].cluster_id for s in told.votes if s in self._sealed
        )
        if told.outcome == "aborted":
            self._gave_up.add(sender)
        self._changed.set()
        if forged is not None:
            raise forged

    async def settled(self, timeout_s: float) -> None:
        """Until there is nothing left to wait for, or for timeout_s seconds."""
        await _wait(self._settled, timeout_s)

    async def decide(
        self,
        sealed: bytes,
        members: list[str],
        teller: str,
        unreachable: Collection[str],
        tell: Callable[[str, Votes], Awaitable[Votes | None]],
        timeouts: Timeouts,
        deadline: Deadline,
    ) -> Outcome:
        """Cast our sealed vote and find the outcome, by the deadline at the latest.

        teller: the member that collects. unreachable: members that we cannot call, only they us. tell: sends
        our votes to a member and returns what it knows, None if it cannot be reached; it may take poll_s if
        there is nothing new.
        """
        self.members, self._call = members, open_sealed(sealed, self._run_id, Vote).call
        self._sealed = {s: vote for s, vote in self._sealed.items() if vote.cluster_id in members}
        self._enter(sealed, self.me)
        self._frozen_s = timeouts.reply_s
        others = [m for m in members if m != self.me and m not in unreachable]
        talks: list[asyncio.Task[None]] = []
        if teller == self.me:
            talks.append(asyncio.create_task(self._wake(others, tell, timeouts, deadline)))
        else:
            talks.append(asyncio.create_task(self._talk(teller, tell, deadline)))
        try:
            while self.outcome == "open":
                if teller in self._lost and len(talks) == 1:
                    talks += [
                        asyncio.create_task(self._talk(m, tell, deadline)) for m in others if m != teller
                    ]
                self._count(others, by_call=teller == self.me)
                if self.outcome == "open" and deadline.passed:
                    self._end("aborted", "no agreement before the deadline")
                elif self.outcome == "open":
                    self._changed.clear()
                    await _wait(self._changed, min(0.5, max(0.01, deadline.remaining())))
        finally:
            for task in talks:
                task.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
        reachable = [m for m in others if m not in self._lost]
        if self.outcome == "aborted":  # not by way of the teller: it may be the one to blame
            await self._hear_all(reachable, tell, Deadline(min(1.0, timeouts.poll_s)))
        elif teller != self.me:
            final = reachable if teller in self._lost else [teller]
            await asyncio.gather(
                *(within(tell(m, self.message()), timeouts.reply_s) for m in final), return_exceptions=True
            )
        return self.outcome

    async def _hear_all(
        self, members: list[str], tell: Callable[[str, Votes], Awaitable[Votes | None]], deadline: Deadline
    ) -> None:
        """Tell that it is over, and learn who accuses whom: all should know the same in the next attempt."""
        while not deadline.passed:
            asked = [within(tell(m, self.message()), max(0.1, deadline.remaining())) for m in members]
            for member, told in zip(
                members, await asyncio.gather(*asked, return_exceptions=True), strict=True
            ):
                if isinstance(told, Votes):
                    with contextlib.suppress(NotTrustedError):
                        self.merge(member, told)
            if all(m in self.votes for m in self.members if m not in self._lost):
                return
            await deadline.sleep(_AGAIN_S)

    async def _talk(
        self, member: str, tell: Callable[[str, Votes], Awaitable[Votes | None]], deadline: Deadline
    ) -> None:
        failed_since: float | None = None
        failures = 0
        while self.outcome == "open" and not deadline.passed:
            asked = time.monotonic()
            told = await tell(member, self.message())
            if told is None:
                failed_since = failed_since or asked
                failures += 1
                if failures >= _LOST_AFTER or time.monotonic() - failed_since >= self._frozen_s:
                    self._lost.add(member)
                    self._changed.set()
                await deadline.sleep(_AGAIN_S)
            else:
                failed_since, failures = None, 0
                self._lost.discard(member)
                self._heard.add(member)
                try:
                    self.merge(member, told)
                except NotTrustedError:  # a liar is as good as lost
                    self._lost.add(member)
                    self._changed.set()
                    return
                if time.monotonic() - asked < _AGAIN_S:
                    await deadline.sleep(_AGAIN_S)

    async def _wake(
        self,
        others: list[str],
        tell: Callable[[str, Votes], Awaitable[Votes | None]],
        timeouts: Timeouts,
        deadline: Deadline,
    ) -> None:
        """The teller is called by the others; those that it does not hear from it calls itself."""
        await deadline.sleep(timeouts.poll_s)
        await asyncio.gather(*(self._talk(m, tell, deadline) for m in others if m not in self._told))

    def _enter(self, sealed: bytes, sender: str) -> None:
        if sealed in self._sealed or len(self._sealed) >= _MOST_VOTES:
            return
        vote = open_sealed(sealed, self._run_id, Vote)
        if (vote.t, vote.attempt) != (self.t, self.attempt):
            raise NotTrustedError(f"a vote on outer step {vote.t} among those on {self.t}")
        # Before we know who the members are, everyone may only speak for itself: there is no end of clusters.
        if vote.cluster_id in self.members or (not self.members and vote.cluster_id == sender):
            self._sealed[sealed] = vote
            if self.complete:
                self._settled.set()

    def _agree(self) -> bool:
        votes = [v for m, v in self.votes.items() if m in self.members]
        return len({v.digest for v in votes}) == 1 and all(v.call == self._call for v in votes)

    def _shown_complete(self, member: str) -> bool:
        return bool(self.members) and set(self.members) <= self._told.get(member, set())

    def _count(self, others: Iterable[str], by_call: bool) -> None:
        """by_call: the others call us with their votes."""
        known = {m: v for m, v in self.votes.items() if m in self.members}
        if refusals := sorted(m for m, vote in known.items() if not vote.digest):
            reasons = dict.fromkeys(known[m].reason for m in refusals if known[m].reason)
            self._end(
                "aborted",
                f"{', '.join(refusals)} could not average" + (f": {'; '.join(reasons)}" if reasons else ""),
            )
        elif known and not self._agree():
            self._end("aborted", "the members' averages differ")
        elif quitters := sorted(
            m for m in self._gave_up if m in self.members and not self._shown_complete(m)
        ):
            self._end("aborted", f"{', '.join(quitters)} gave up")
        elif self.complete:
            alive = [m for m in others if m not in self._lost]
            if not alive or any(self._shown_complete(m) for m in alive):
                self._end("committed", "unanimous")
        else:
            missing = sorted(m for m in self.members if m not in known and m in self._lost)
            # Somebody who can be reached may have it: hear them all before giving up.
            heard = all(m in self._lost or m in self._heard or (by_call and m in self._told) for m in others)
            if missing and heard:
                self._end("aborted", f"{', '.join(missing)} cannot be reached")

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self.outcome == "open":
            self.outcome, self.reason = outcome, reason
            self._changed.set()
            self._settled.set()


def check_votes(
    sealed: Iterable[bytes], run_id: str, t: int, call: str, members: list[str], digest: str
) -> None:
    """Raises NotTrustedError unless these are the members' votes for `digest` as the average of the roster
    `call`.
    """
    votes = [open_sealed(s, run_id, Vote) for s in sealed]
    for vote in votes:
        if (vote.t, vote.call, vote.digest) != (t, call, digest):
            raise NotTrustedError(
                f"cluster {vote.cluster_id} did not vote for this average of outer step {t}"
            )
    if sorted(v.cluster_id for v in votes) != sorted(members):
        raise NotTrustedError(
            f"{len(votes)} votes on outer step {t}, expected one of each of {len(members)} members"
        )


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await within(event.wait(), timeout_s)
    except TimeoutError:
        return


def over_all_stages(parts: dict[int, list[str]]) -> list[str]:
    """Per member one digest of what came from it on all stages; parts: per stage its digests, by member."""
    by_member = zip(*(parts[stage] for stage in sorted(parts)), strict=True)
    return [part_digest(digest.encode() for digest in of_member) for of_member in by_member]
