"""Votes among members in one event loop, with links that fail at every possible moment."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.vote import Ballot
from p2p_dilocox.swarm.messages import Outcome, Votes

MEMBERS = ["a", "b", "c"]
TIMEOUTS = Timeouts(round_s=4.0)


def ids(names: list[str]) -> list[str]:
    return [n * 16 for n in names]  # messages accept cluster ids only


class Assembly:
    """Members that tell each other votes; `cut` says whether one message gets through, in each direction."""

    def __init__(self, members: list[str], cut: Callable[[str, str], bool]) -> None:
        self.ballots = {m: Ballot(1, 0, m) for m in ids(members)}
        self.dead: set[str] = set()
        self.cut = cut

    def tell(self, sender: str) -> Callable[[str, Votes], Awaitable[Votes | None]]:
        async def tell(member: str, votes: Votes) -> Votes | None:
            await asyncio.sleep(0)
            if {sender, member} & self.dead or self.cut(sender, member):
                return None
            self.ballots[member].merge(sender, votes)
            answer = self.ballots[member].message()
            return None if self.cut(member, sender) else answer

        return tell

    async def vote(self, votes: dict[str, str], deadline_s: float = 1.5) -> dict[str, Outcome]:
        voters = {m * 16: v for m, v in votes.items()}
        outcomes = await asyncio.gather(
            *(
                self.ballots[m].decide(v, list(self.ballots), self.tell(m), TIMEOUTS, Deadline(deadline_s))
                for m, v in voters.items()
            )
        )
        return dict(zip(voters, outcomes, strict=True))


def test_equal_votes_commit_everywhere() -> None:
    assembly = Assembly(MEMBERS, lambda *_: False)
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, "d" * 64)))
    assert set(outcomes.values()) == {"committed"}


@pytest.mark.parametrize("votes", [("x", "x", "y"), ("x", "x", ""), ("", "", "")])
def test_unequal_or_missing_averages_abort_everywhere(votes: tuple[str, str, str]) -> None:
    assembly = Assembly(MEMBERS, lambda *_: False)
    outcomes = asyncio.run(assembly.vote(dict(zip(MEMBERS, votes, strict=True))))
    assert set(outcomes.values()) == {"aborted"}


def test_a_member_that_never_votes_ends_in_an_abort() -> None:
    assembly = Assembly(MEMBERS, lambda *_: False)
    assembly.dead = {"c" * 16}
    outcomes = asyncio.run(assembly.vote({"a": "x", "b": "x"}))
    assert set(outcomes.values()) == {"aborted"}
    assert "cccccccccccccccc cannot be reached" in assembly.ballots["a" * 16].reason


@pytest.mark.parametrize("moment", range(12))
def test_a_death_at_any_moment_leaves_the_others_with_one_outcome(moment: int) -> None:
    """Rule V2: if the dead member can have committed, the survivors commit as well."""
    count = itertools.count()
    assembly = Assembly(MEMBERS, lambda *_: False)

    def cut(_sender: str, _receiver: str) -> bool:
        if next(count) == moment:
            assembly.dead.add("c" * 16)
        return False

    assembly.cut = cut
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, "x")))
    assert outcomes["a" * 16] == outcomes["b" * 16]
    if assembly.ballots["c" * 16].outcome == "committed":
        assert outcomes["a" * 16] == "committed"


@pytest.mark.parametrize("seed", range(20))
def test_lossy_links_never_split_the_outcome(seed: int) -> None:
    dice = random.Random(seed)
    assembly = Assembly(MEMBERS, lambda *_: dice.random() < 0.3)
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, "x"), deadline_s=3.0))
    assert len(set(outcomes.values())) == 1
