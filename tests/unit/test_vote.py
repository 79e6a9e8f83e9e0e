"""Votes among members in one event loop, with links that fail at every possible moment."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from p2p_dilocox.averaging.deadlines import Deadline, Timeouts
from p2p_dilocox.averaging.vote import Ballot, check_votes
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Outcome, Vote, Votes, seal

TIMEOUTS = Timeouts(round_s=4.0)
KEYS = {key.cluster_id: key for key in (SigningKey.generate() for _ in range(3))}
MEMBERS = sorted(KEYS)
CALL, DIGEST, OTHER = "c" * 64, "1" * 64, "2" * 64


def sealed(member: str, digest: str, call: str = CALL, attempt: int = 0) -> bytes:
    vote = Vote(cluster_id=member, t=1, attempt=attempt, call=call, digest=digest)
    return seal(KEYS[member], "run", vote)


class Assembly:
    """Members that tell each other votes; `cut` says whether one message gets through, in each direction."""

    def __init__(self, cut: Callable[[str, str], bool] = lambda *_: False, teller: int = 0) -> None:
        self.ballots = {m: Ballot(1, 0, m, "run") for m in MEMBERS}
        self.teller = MEMBERS[teller]
        self.dead: set[str] = set()
        self.cut = cut

    def tell(self, sender: str) -> Callable[[str, Votes], Awaitable[Votes | None]]:
        async def tell(member: str, votes: Votes) -> Votes | None:
            await asyncio.sleep(0)
            if {sender, member} & self.dead or self.cut(sender, member):
                return None
            with contextlib.suppress(NotTrustedError):  # goes to the sender alone
                self.ballots[member].merge(sender, votes)
            await self.ballots[member].settled(0.05)
            if {sender, member} & self.dead:
                return None
            answer = self.ballots[member].message()
            return None if self.cut(member, sender) else answer

        return tell

    async def vote(self, votes: dict[str, str], deadline_s: float = 1.5) -> dict[str, Outcome]:
        outcomes = await asyncio.gather(
            *(
                self.ballots[m].decide(
                    sealed(m, v), MEMBERS, self.teller, (), self.tell(m), TIMEOUTS, Deadline(deadline_s)
                )
                for m, v in votes.items()
            )
        )
        return dict(zip(votes, outcomes, strict=True))


def committed_or_proven(assembly: Assembly, member: str, outcome: Outcome) -> bool:
    """Whether a member committed, or would as soon as it hears of a commit: it holds all votes then."""
    ballot = assembly.ballots[member]
    for other in assembly.ballots.values():
        if other.outcome == "committed":
            ballot.merge(other.me, other.message())
    return outcome == "committed" or ballot.complete


@pytest.mark.parametrize("teller", range(3))
def test_equal_votes_commit_everywhere_and_prove_it(teller: int) -> None:
    assembly = Assembly(teller=teller)
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, DIGEST)))
    assert set(outcomes.values()) == {"committed"}
    for ballot in assembly.ballots.values():
        check_votes(ballot.proof(), "run", 1, CALL, MEMBERS, DIGEST)


@pytest.mark.parametrize("votes", [(DIGEST, DIGEST, OTHER), (DIGEST, DIGEST, ""), ("", "", "")])
@pytest.mark.parametrize("teller", range(3))
def test_unequal_or_missing_averages_abort_everywhere(votes: tuple[str, str, str], teller: int) -> None:
    assembly = Assembly(teller=teller)
    outcomes = asyncio.run(assembly.vote(dict(zip(MEMBERS, votes, strict=True))))
    assert set(outcomes.values()) == {"aborted"}


@pytest.mark.parametrize("teller", range(3))
def test_a_member_that_never_votes_ends_in_an_abort(teller: int) -> None:
    assembly = Assembly(teller=teller)
    assembly.dead = {MEMBERS[2]}
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS[:2], DIGEST)))
    assert set(outcomes.values()) == {"aborted"}
    assert any(f"{MEMBERS[2]} cannot be reached" in b.reason for b in assembly.ballots.values())


@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("teller", range(3))
def test_a_death_at_any_moment_leaves_the_others_with_one_outcome(moment: int, teller: int) -> None:
    """Rule V2: if the dead member can have committed, the survivors commit as well."""
    count, dead = itertools.count(), MEMBERS[2]
    assembly = Assembly(teller=teller)

    def cut(_sender: str, _receiver: str) -> bool:
        if next(count) == moment:
            assembly.dead.add(dead)
        return False

    assembly.cut = cut
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, DIGEST)))
    assert outcomes[MEMBERS[0]] == outcomes[MEMBERS[1]]
    if assembly.ballots[dead].outcome == "committed":
        assert outcomes[MEMBERS[0]] == "committed"


@pytest.mark.parametrize("seed", range(20))
def test_over_lossy_links_a_commit_of_one_is_a_commit_of_all_who_hear_of_it(seed: int) -> None:
    dice = random.Random(seed)
    assembly = Assembly(lambda *_: dice.random() < 0.3, teller=seed % 3)
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, DIGEST), deadline_s=3.0))
    if "committed" in outcomes.values():
        assert all(committed_or_proven(assembly, m, outcome) for m, outcome in outcomes.items())


def test_nobody_can_vote_for_another() -> None:
    ballot, forger = Ballot(1, 0, MEMBERS[0], "run"), KEYS[MEMBERS[1]]
    forged = seal(forger, "run", Vote(cluster_id=MEMBERS[2], t=1, attempt=0, call=CALL, digest=DIGEST))
    with pytest.raises(NotTrustedError, match="signed it"):
        ballot.merge(MEMBERS[1], Votes(t=1, attempt=0, votes=[forged], outcome="open"))
    elsewhere = sealed(MEMBERS[1], DIGEST, attempt=1)
    with pytest.raises(NotTrustedError):
        ballot.merge(MEMBERS[1], Votes(t=1, attempt=0, votes=[elsewhere], outcome="open"))


@pytest.mark.parametrize("liar", range(3))
def test_forged_votes_fail_nobody_else_and_name_who_told_them(liar: int) -> None:
    assembly = Assembly(teller=liar)
    forger = MEMBERS[liar]
    victim = MEMBERS[(liar + 1) % 3]
    vote = Vote(cluster_id=victim, t=1, attempt=0, call=CALL, digest=OTHER)
    assembly.ballots[forger]._sealed[seal(KEYS[forger], "run", vote)] = vote
    honest = [m for m in MEMBERS if m != forger]
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(honest, DIGEST)))
    assert set(outcomes.values()) == {"aborted"}
    assert any(forger in assembly.ballots[m].forgers for m in honest)
    assert all(set(assembly.ballots[m].forgers) <= {forger} for m in honest)


def test_saying_that_a_round_is_committed_commits_nothing() -> None:
    assembly = Assembly()
    liar = Votes(t=1, attempt=0, votes=[sealed(MEMBERS[1], DIGEST)], outcome="committed")
    assembly.ballots[MEMBERS[0]].merge(MEMBERS[1], liar)
    assembly.dead = {MEMBERS[2]}
    assert set(asyncio.run(assembly.vote(dict.fromkeys(MEMBERS[:2], DIGEST))).values()) == {"aborted"}


def test_of_two_votes_of_one_member_the_no_counts() -> None:
    assembly = Assembly()
    for ballot in assembly.ballots.values():
        both = [sealed(MEMBERS[2], DIGEST), sealed(MEMBERS[2], "")]
        ballot.merge(MEMBERS[2], Votes(t=1, attempt=0, votes=both, outcome="open"))
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, DIGEST)))
    assert set(outcomes.values()) == {"aborted"}


@pytest.mark.parametrize("fault", ["missing", "twice", "another digest", "another call", "forged"])
def test_a_proof_needs_the_vote_of_every_member(fault: str) -> None:
    votes = [sealed(m, DIGEST) for m in MEMBERS]
    if fault == "missing":
        votes.pop()
    elif fault == "twice":
        votes[2] = votes[1]
    elif fault == "another digest":
        votes[2] = sealed(MEMBERS[2], OTHER)
    elif fault == "another call":
        votes[2] = sealed(MEMBERS[2], DIGEST, call=OTHER)
    else:
        votes[2] = votes[2][:-1] + bytes([votes[2][-1] ^ 1])
    with pytest.raises(NotTrustedError):
        check_votes(votes, "run", 1, CALL, MEMBERS, DIGEST)


def test_one_that_is_no_member_cannot_make_others_give_up() -> None:
    assembly, stranger = Assembly(), SigningKey.generate().cluster_id
    for ballot in assembly.ballots.values():
        ballot.merge(stranger, Votes(t=1, attempt=0, votes=[], outcome="aborted"))
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS, DIGEST)))
    assert set(outcomes.values()) == {"committed"}


def test_a_member_that_gives_up_ends_the_round_for_all() -> None:
    assembly = Assembly()
    assembly.ballots[MEMBERS[1]].merge(MEMBERS[2], Votes(t=1, attempt=0, votes=[], outcome="aborted"))
    assembly.dead = {MEMBERS[2]}
    outcomes = asyncio.run(assembly.vote(dict.fromkeys(MEMBERS[:2], DIGEST)))
    assert set(outcomes.values()) == {"aborted"}
