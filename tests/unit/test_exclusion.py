"""Who is left out of a round: quarrels, strikes and pseudo-gradients that stand out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dilocox.averaging.exclusion import Grudges, NormCap, different_parts, left_out, to_blame
from p2p_dilocox.swarm.messages import Vote

CLUSTERS = st.sets(st.sampled_from("abcdefgh"), min_size=1)


@given(st.dictionaries(st.sampled_from("abcdefgh"), CLUSTERS))
def test_those_that_remain_refuse_nobody_who_remains(without: dict[str, set[str]]) -> None:
    gone = left_out(without)
    remain = [c for c in without if c not in gone]
    assert not any(b in without[a] for a, b in itertools.permutations(remain, 2))
    assert left_out({c: without[c] for c in remain}) == []


def test_without_quarrels_nobody_goes() -> None:
    assert left_out({"a": [], "b": ["z"], "c": ["c"]}) == []


def test_a_liar_that_refuses_several_goes_itself() -> None:
    assert left_out({"a": [], "b": [], "c": [], "liar": ["a", "b"]}) == ["liar"]


def test_whom_others_refuse_goes_and_not_who_refuses() -> None:
    assert left_out({"a": ["bad"], "b": ["bad"], "c": [], "bad": []}) == ["bad"]
    assert left_out({"a": ["bad"], "b": [], "bad": []}) == ["bad"]


def test_strikes_in_a_row_double_the_time_and_a_committed_round_ends_it() -> None:
    grudges, excluded = Grudges(), []
    t = 1
    for _ in range(5):
        grudges.strike("slow", t)
        until = grudges.until("slow")
        excluded.append(until - t + 1)
        assert all("slow" in grudges.without(u) for u in range(t, until + 1))
        assert "slow" not in grudges.without(until + 1)
        t = until + 1
    assert excluded == [1, 2, 4, 8, 16]
    grudges.forgive(["slow", "other"])
    assert grudges.without(t) == []
    grudges.strike("slow", t)
    assert grudges.until("slow") == t


def test_the_longest_exclusion_is_32_outer_steps() -> None:
    grudges = Grudges()
    for _ in range(50):
        grudges.strike("bad", 100)
    assert grudges.until("bad") - 100 + 1 == 32


@pytest.mark.parametrize(
    ("rounds", "now", "cap"),
    [
        ([[1.0, 1.0, 1.0]], [1.0, 1e17], 10.0),
        ([[1.0, 2.0, 3.0]], [5.0, 5.0], 50.0),  # the whole run moves more: that is the run's business
        ([], [1.0, 1.0, 1e17], 10.0),  # the first round: most against one
        ([], [1.0, 1e17], float("inf")),  # the first two alone cannot tell
        ([[0.0, 0.0]], [0.0, 4.0], float("inf")),
        ([[2.0]] + [[1.0, 1.0, 1.0]] * 8, [1.0], 10.0),  # eight rounds are remembered
    ],
)
def test_the_cap_is_ten_times_the_median(rounds: list[list[float]], now: list[float], cap: float) -> None:
    norms = NormCap()
    for norms_of_round in rounds:
        norms.remember(norms_of_round)
    assert norms.cap(now) == cap


def test_one_of_two_cannot_lift_the_cap_for_itself() -> None:
    norms = NormCap()
    norms.remember([1.0, 1.0])
    assert norms.cap([1.0, 1e9]) == 10.0


def votes(**parts: str) -> dict[str, Vote]:
    """One letter per member's part; a voter's digest of a part is that letter."""
    return {
        c: Vote(
            cluster_id=c * 16,
            t=1,
            attempt=0,
            call="c" * 64,
            digest="d" * 64,
            parts=[p * 16 for p in of_voter],
        )
        for c, of_voter in parts.items()
    }


@pytest.mark.parametrize(
    ("found", "gone"),
    [
        (votes(a="0101", b="0101", c="0101", d="0101"), []),
        (votes(a="0001", b="0011", c="0021", d="0021"), ["c"]),  # c sent other averages to a and b
        (votes(a="0000", b="0000", c="0000", d="1110"), ["d"]),  # d says so of everybody
        (votes(a="0100", b="0000", c="0000", d="0000"), ["b"]),  # a and b quarrel: nobody can tell
    ],
)
def test_who_sends_other_averages_to_each_is_found(found: dict[str, Vote], gone: list[str]) -> None:
    accusers = different_parts("abcd", found)
    assert left_out({c: accusers.get(c, []) for c in "abcd"}) == gone


def no(cluster: str, *accused: str, digest: str = "") -> Vote:
    return Vote(
        cluster_id=cluster * 16, t=1, attempt=0, call="c" * 64, digest=digest, reason=f"{cluster} says no",
        accused=list(accused),
    )  # fmt: skip


def test_all_who_know_the_same_votes_blame_the_same() -> None:
    votes = {"a": no("a", "slow"), "b": no("b", "slow"), "slow": no("slow", "a")}
    for me in ("a", "b", "c"):
        seen = {"slow": "was too slow"} if me == "a" else {}
        assert to_blame(me, ["a", "b", "c", "slow"], votes, {}, seen) == {
            "slow": "it was too slow" if me == "a" else "a says no"
        }
    assert to_blame("slow", ["a", "b", "c", "slow"], votes, {}, {"a": "is gone"}) == {}


def test_who_hears_hardly_anybody_blames_nobody_but_forgers() -> None:
    """Else it would refuse an innocent once its link is back, and the others would have to leave that out."""
    alone = {"slow": no("slow", "a")}
    assert to_blame("slow", ["a", "b", "slow"], alone, {}, {"a": "is gone"}) == {}
    assert list(to_blame("slow", ["a", "b", "slow"], alone, {"b": "no signature"}, {})) == ["b"]
    assert list(to_blame("slow", ["a", "slow"], alone, {}, {"a": "is gone"})) == ["a"]  # of two it is half


def test_who_alone_could_not_average_or_did_not_vote_would_fail_again() -> None:
    votes = {c: no(c, digest="d" * 64) for c in "abc"}
    assert to_blame("a", [*"abcd"], votes, {}, {}) == {"d": "it did not vote"}
    assert to_blame("a", [*"abcd"], votes | {"d": no("d")}, {}, {}) == {"d": "d says no"}
    assert to_blame("a", [*"abcd"], votes | {"b": no("b"), "c": no("c"), "d": no("d")}, {}, {}) == {}
