"""Votes on a round: it is committed by every member or by none (rule V2).

Each member casts one vote per (t, attempt): the digest over all its stages' averages, or "" for no. Members
tell each
other all votes they know. A member commits once it knows an equal vote of every member and every other
member that can
be reached has acknowledged its own. So after the death of any one member the others know the same votes: if
the dead
one can have committed, all of them can; if a vote is missing
everywhere, it cannot have, and they abort and retry.
"""

import asyncio
from collections.abc import Awaitable, Callable

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.swarm.messages import Outcome, Votes

__all__ = ["Ballot"]

_AGAIN_S = 0.1
_LOST_AFTER = 3  # calls in a row that fail before a member counts as lost


class Ballot:
    """The votes on one attempt of one outer step, as one member knows them."""

    def __init__(self, t: int, attempt: int, me: str) -> None:
        self.t, self.attempt, self.me = t, attempt, me
        self.votes: dict[str, str] = {}
        self.outcome: Outcome = "open"
        self.reason = ""
        self._acknowledged: set[str] = set()
        self._changed = asyncio.Event()

    def message(self) -> Votes:
        return Votes(t=self.t, attempt=self.attempt, votes=self.votes, outcome=self.outcome)

    def merge(self, sender: str, told: Votes) -> None:
        """Learn what `sender`, another member, knows."""
        for member, vote in told.votes.items():
            self.votes.setdefault(member, vote)
        if self.me in told.votes:
            self._acknowledged.add(sender)
        if self.outcome == "open" and told.outcome != "open":
            self._end(told.outcome, f"{sender} says so")
        self._changed.set()

    def abort(self, reason: str) -> None:
        if self.outcome == "open":
            self._end("aborted", reason)

    async def decide(
        self,
        digest: str,
        members: list[str],
        tell: Callable[[str, Votes], Awaitable[Votes | None]],
        timeouts: Timeouts,
        deadline: Deadline,
    ) -> Outcome:
        """Cast our vote and find the outcome, by the deadline at the latest.

        tell: sends our votes to a member and returns its own, None if it cannot be reached.
        """
        self.votes.setdefault(self.me, digest)
        others = [m for m in members if m != self.me]
        lost: set[str] = set()

        async def talk(member: str) -> None:
            failures = 0
            while self.outcome == "open" and not deadline.passed:
                told = await tell(member, self.message())
                if told is None:
                    failures += 1
                    if failures >= _LOST_AFTER:
                        lost.add(member)
                        self._changed.set()
                else:
                    failures = 0
                    lost.discard(member)
                    self.merge(member, told)
                await deadline.sleep(_AGAIN_S)

        talks = [asyncio.create_task(talk(m)) for m in others]
        try:
            while self.outcome == "open":
                self._count(members, lost)
                if self.outcome != "open":
                    break
                if deadline.passed:
                    self.abort("no agreement before the deadline")
                    break
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), min(0.5, max(0.01, deadline.remaining())))
                except TimeoutError:
                    continue
        finally:
            for task in talks:
                task.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
        final = self.message()
        await asyncio.gather(
            *(asyncio.wait_for(tell(m, final), timeouts.reply_s) for m in others if m not in lost),
            return_exceptions=True,
        )
        return self.outcome

    def _count(self, members: list[str], lost: set[str]) -> None:
        known = {m: self.votes[m] for m in members if m in self.votes}
        if refusals := sorted(m for m, vote in known.items() if not vote):
            self.abort(f"{', '.join(refusals)} could not average")
        elif len(set(known.values())) > 1:
            self.abort("the members' averages differ")
        elif len(known) == len(members):
            if all(m in self._acknowledged or m in lost for m in members if m != self.me):
                self._end("committed", "unanimous")
        elif missing := sorted(m for m in members if m not in known and m in lost):
            self.abort(f"{', '.join(missing)} cannot be reached")

    def _end(self, outcome: Outcome, reason: str) -> None:
        self.outcome, self.reason = outcome, reason
        self._changed.set()
