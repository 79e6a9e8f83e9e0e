"""The roll call: who is waited for, who is left out, and what a coordinator must never do."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import pytest

from p2p_dilocox.averaging.deadlines import Timeouts
from p2p_dilocox.averaging.exclusion import NormCap
from p2p_dilocox.averaging.rollcall import RollCalls, coordinator_order, read_call
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import PROTOCOL, Call, CallReply, RankAddress, Ready, Standing, seal

SPEC, LINEAGE, OTHER = "5" * 64, "1" * 64, "2" * 64
PEER = "12D3KooWKrsNNSqV8PpeGJM2CTxwQKz67SJQLUCiTahKMhgKLqb9"
KEYS = sorted((SigningKey.generate() for _ in range(3)), key=lambda k: k.cluster_id)
ME, *OTHERS = [k.cluster_id for k in KEYS]


def ready(
    key: SigningKey,
    t: int = 1,
    lineage: str = LINEAGE,
    spec: str = SPEC,
    protocol: int = PROTOCOL,
    weight: float = 10.0,
    norm: float = 1.0,
    without: Sequence[str] = (),
    fingerprint: Sequence[float] = (),
) -> bytes:
    address = RankAddress(peer=PEER, maddrs=[], stages=[0])
    message = Ready(
        protocol=protocol, spec=spec, cluster_id=key.cluster_id, name="c", t=t, attempt=0, lineage=lineage,
        weight=weight, norm=norm, without=list(without), fingerprint=list(fingerprint),
        ranks=[address],
    )  # fmt: skip
    return seal(key, "run", message)


def gate(*allowed: str) -> Gate:
    return Gate(KEYS[0], "run", PEER, allowed)


def standing(cluster: str, t: int, follows: int = 0) -> Standing:
    return Standing(
        cluster_id=cluster, t=t, h=0, committed_t=t, lineage=LINEAGE, members=[], in_flight=0, follows=follows
    )


def coordinator(
    expected: Sequence[str],
    standings: dict[str, int],
    *,
    coordinators: Sequence[str] = (ME,),
    min_clusters: int = 1,
    members: Sequence[str] = (),
    round_s: float = 2.0,
    norms: Sequence[float] = (),
    proofs: dict[str, str] | None = None,
    quorum: int = 1,
    follows: dict[str, int] | None = None,
    doubted: Sequence[str] = (),
) -> RollCalls:
    """standings: the outer steps that clusters which answer are past. doubted: those of them that seemed
    frozen a moment ago. norms: of the last round. proofs: the lineage before the outer step in question, of
    clusters that can prove that they committed it.
    """
    cap = NormCap()
    cap.remember(norms)

    async def standing_of(cluster: str, again: bool) -> Standing | None:
        if cluster not in standings or (cluster in doubted and not again):
            return None
        return standing(cluster, standings[cluster], (follows or {}).get(cluster, 0))

    async def parent_of(cluster: str, t: int) -> str:
        return (proofs or {}).get(cluster, "")

    return RollCalls(
        me=ME,
        run_id="run",
        spec_digest=SPEC,
        timeouts=Timeouts(round_s=round_s),
        coordinators=lambda: coordinators,
        expected=lambda: expected,
        standing_of=standing_of,
        parent_of=parent_of,
        min_clusters=lambda: min_clusters,
        quorum=quorum,
        gate=gate(*members),
        norm_cap=cap.cap,
        weight_cap=100.0,
    )


async def until_answered(ask: Callable[[], Awaitable[CallReply]]) -> CallReply:
    while True:
        reply = await ask()
        if reply != CallReply():
            return reply


def members_after(calls: RollCalls, *sealed: bytes) -> list[str]:
    async def run() -> list[str]:
        replies = await asyncio.gather(
            *(until_answered(lambda s=s: calls.answer(s, last_t=0)) for s in sealed)  # type: ignore[misc]
        )
        await calls.close()
        found = {tuple(read_call(r.call, "run", gate(), 100.0).ids) for r in replies if r.call}
        assert len(found) == 1
        return list(found.pop())

    return asyncio.run(run())


def test_all_expected_clusters_get_the_same_list() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0))
    assert members_after(calls, *(ready(k) for k in KEYS)) == [ME, *OTHERS]


def test_the_dead_are_not_waited_for() -> None:
    calls = coordinator([ME, *OTHERS], {})
    assert members_after(calls, ready(KEYS[0]), ready(KEYS[1])) == [ME, OTHERS[0]]


def test_a_slow_cluster_is_waited_for_until_the_deadline_and_no_longer() -> None:
    calls = coordinator([ME, OTHERS[0]], {OTHERS[0]: 0})
    assert members_after(calls, ready(KEYS[0])) == [ME]


def test_who_has_come_in_too_late_for_a_round_and_follows_it_is_not_waited_for() -> None:
    follows = {OTHERS[1]: 1}
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0), round_s=1000.0, follows=follows)
    assert members_after(calls, ready(KEYS[0]), ready(KEYS[1])) == [ME, OTHERS[0]]


def test_a_step_that_another_cluster_proves_to_have_committed_is_not_committed_again() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0) | {OTHERS[0]: 1}, proofs={OTHERS[0]: LINEAGE})
    reply = asyncio.run(until_answered(lambda: calls.answer(ready(KEYS[0]), last_t=0)))
    assert reply.over and reply.call is None


def test_a_step_that_most_have_dropped_is_not_committed_by_the_rest() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 1))
    reply = asyncio.run(until_answered(lambda: calls.answer(ready(KEYS[0]), last_t=0)))
    assert reply.over and reply.call is None


@pytest.mark.parametrize("proofs", [{}, {OTHERS[1]: OTHER}])
def test_the_claim_of_one_that_a_step_is_over_stops_nobody(proofs: dict[str, str]) -> None:
    calls = coordinator([ME, *OTHERS], {OTHERS[0]: 0, OTHERS[1]: 10**9}, proofs=proofs)
    assert members_after(calls, ready(KEYS[0]), ready(KEYS[1])) == [ME, OTHERS[0]]


def test_who_is_refused_by_most_is_not_waited_for() -> None:
    """Its deadline has not passed when the call closes: a frozen one still counts as alive for a while."""
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0), round_s=1000.0)
    sealed = [ready(KEYS[0], without=[OTHERS[1]]), ready(KEYS[1], without=[OTHERS[1]])]
    assert members_after(calls, *sealed) == [ME, OTHERS[0]]


def test_one_that_refuses_all_others_does_not_close_the_call_for_itself() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0))
    sealed = [ready(KEYS[0], without=OTHERS), ready(KEYS[1]), ready(KEYS[2])]
    assert members_after(calls, *sealed[1:], sealed[0]) == OTHERS


def test_a_few_do_not_go_on_while_most_are_alive_and_late() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0))
    reply = asyncio.run(until_answered(lambda: calls.answer(ready(KEYS[0]), last_t=0)))
    assert reply.dropped and reply.call is None


def test_one_does_not_commit_what_half_have_dropped() -> None:
    """Two of four say that the step is over, and cannot prove that it was committed; the fourth is silent."""
    calls = coordinator([ME, *OTHERS, "fourth"], dict.fromkeys(OTHERS, 1))
    reply = asyncio.run(until_answered(lambda: calls.answer(ready(KEYS[0]), last_t=0)))
    assert reply.dropped == "1 of 3 clusters came to the roll call, fewer than half"


def test_one_that_nobody_answered_a_moment_ago_does_not_go_on_alone_but_asks_them_again() -> None:
    """Its own machine stood still: both others seem frozen, of which one has taken the step meanwhile."""
    standings, proofs = dict.fromkeys(OTHERS, 1), {OTHERS[1]: LINEAGE}
    calls = coordinator([ME, *OTHERS], standings, round_s=1000.0, doubted=OTHERS, proofs=proofs)
    reply = asyncio.run(until_answered(lambda: calls.answer(ready(KEYS[0]), last_t=0)))
    assert reply.over and reply.call is None


def test_most_do_not_wait_for_one_that_seems_frozen() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0), round_s=1000.0, doubted=OTHERS)
    assert members_after(calls, ready(KEYS[0]), ready(KEYS[1])) == [ME, OTHERS[0]]


def test_fewer_than_the_quorum_take_no_outer_step() -> None:
    """R7: a part of the swarm that lost sight of the rest keeps what it trained, and commits nothing."""

    async def run(quorum: int) -> CallReply:
        calls = coordinator([ME, *OTHERS], {}, quorum=quorum)
        reply = await until_answered(lambda: calls.answer(ready(KEYS[0]), last_t=0))
        await calls.close()
        return reply

    assert asyncio.run(run(1)).call is not None
    alone = asyncio.run(run(2))
    assert alone.call is None
    assert alone.dropped == "1 clusters came to the roll call, the quorum is 2"


def test_a_roll_call_stops_waiting_for_a_cluster_that_says_it_leaves() -> None:
    expected, gone = [ME, *OTHERS], OTHERS[-1]

    async def run() -> CallReply:
        calls = coordinator(expected, dict.fromkeys(OTHERS, 0), round_s=1e6)
        await calls.answer(ready(KEYS[-1], t=1), last_t=0)  # it came to the one before
        ours, theirs = (
            asyncio.create_task(until_answered(lambda k=k: calls.answer(ready(k, t=2), last_t=1)))  # type: ignore[misc]
            for k in KEYS[:-1]
        )
        await asyncio.sleep(0.1)
        expected.remove(gone)
        calls.forget(gone)
        await theirs
        await calls.close()
        return await ours

    call = asyncio.run(run()).call
    assert call is not None
    assert gone not in read_call(call, "run", gate(), 100.0).ids


def test_clusters_of_another_history_are_left_out() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0))
    sealed = [ready(KEYS[0]), ready(KEYS[1]), ready(KEYS[2], lineage=OTHER)]
    assert members_after(calls, *sealed) == [ME, OTHERS[0]]


def test_the_first_step_waits_for_enough_clusters() -> None:
    calls = coordinator([ME], {}, min_clusters=2)

    async def run() -> CallReply:
        early = await calls.answer(ready(KEYS[0]), last_t=0)
        assert early == CallReply()
        reply = await until_answered(lambda: calls.answer(ready(KEYS[1]), last_t=0))
        await calls.close()
        return reply

    call = asyncio.run(run()).call
    assert call is not None
    assert read_call(call, "run", gate(), 100.0).ids == [ME, OTHERS[0]]


def test_who_comes_to_the_second_coordinator_is_sent_to_the_first_while_that_lives() -> None:
    order = coordinator_order([ME, *OTHERS], 1)
    calls = coordinator([ME], {c: 0 for c in order if c != ME}, coordinators=order)
    reply = asyncio.run(calls.answer(ready(KEYS[0]), last_t=0))
    assert reply.redirect == (order[0] if order[0] != ME else None)


@pytest.mark.parametrize(
    ("sealed", "reason"),
    [(ready(KEYS[1], protocol=PROTOCOL + 1), "protocol"), (ready(KEYS[1], spec=OTHER), "spec")],
)
def test_another_protocol_or_spec_is_refused_with_the_reason(sealed: bytes, reason: str) -> None:
    reply = asyncio.run(coordinator([ME], {}).answer(sealed, last_t=0))
    assert reason in reply.refused


def test_a_weight_above_what_can_be_trained_is_refused_with_the_limit() -> None:
    reply = asyncio.run(coordinator([ME], {}).answer(ready(KEYS[1], weight=1e9), last_t=0))
    assert "1e+09 tokens" in reply.refused and "100 at most" in reply.refused


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e18])
def test_a_weight_that_is_no_count_is_no_message(weight: float) -> None:
    with pytest.raises(NotTrustedError):
        asyncio.run(coordinator([ME], {}).answer(ready(KEYS[1], weight=weight), last_t=0))


def test_only_members_of_a_closed_run_may_answer_the_roll_call() -> None:
    calls = coordinator([ME], {}, members=[ME, OTHERS[0]])
    with pytest.raises(NotTrustedError, match="not among the 2 members"):
        asyncio.run(calls.answer(ready(KEYS[2]), last_t=0))


def test_a_pseudo_gradient_far_above_the_usual_is_left_out_and_told_why() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0), norms=[1.0, 1.2, 0.9])
    sealed = [ready(KEYS[0]), ready(KEYS[1]), ready(KEYS[2], norm=1e17)]
    assert members_after(calls, *sealed) == [ME, OTHERS[0]]
    reply = asyncio.run(calls.answer(sealed[2], last_t=0))
    assert "the norm 1e+17, at most 10 is usual" in reply.left_out


def test_a_cluster_whose_anchor_is_not_that_of_most_is_told_that_it_drifted() -> None:
    """Field report C8: different parameters look plausible for long."""
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0))
    right, rounded, wrong = (
        (1.0, -2.0, 0.5, 3.0, 40.0),
        (1.0, -2.0000001, 0.5, 3.0, 40.0),
        (1.0, -2.0, 0.5, 9.0, 40.0),
    )
    sealed = [ready(k, fingerprint=f) for k, f in zip(KEYS, (wrong, right, rounded), strict=True)]

    async def come(sealed: bytes) -> CallReply:
        return await until_answered(lambda: calls.answer(sealed, last_t=0))

    async def run() -> list[CallReply]:
        replies = await asyncio.gather(*(come(s) for s in sealed))
        await calls.close()
        return replies

    drifted, *others = asyncio.run(run())
    assert drifted.drifted and drifted.call is None
    for reply in others:
        assert reply.call is not None
        assert read_call(reply.call, "run", gate(), 100.0).ids == OTHERS


def test_whom_a_member_refuses_is_left_out_of_the_attempt() -> None:
    calls = coordinator([ME, *OTHERS], dict.fromkeys(OTHERS, 0))
    sealed = [ready(KEYS[0], without=[OTHERS[0]]), ready(KEYS[1]), ready(KEYS[2])]
    assert members_after(calls, *sealed) == [ME, OTHERS[1]]


def test_an_outer_step_in_which_nobody_trained_is_dropped_by_all() -> None:
    calls = coordinator([ME], {})
    reply = asyncio.run(until_answered(lambda: calls.answer(ready(KEYS[0], weight=0.0), last_t=0)))
    assert reply.dropped and not reply.over and reply.call is None


def test_a_late_cluster_is_told_that_the_step_is_over() -> None:
    assert asyncio.run(coordinator([ME], {}).answer(ready(KEYS[1], t=3), last_t=3)).over


@pytest.mark.parametrize(
    "damage",
    ["signature", "mixed lineages", "twice", "another step", "another run", "weight", "nothing", "stranger"],
)
def test_a_call_that_is_not_what_it_seems_is_not_trusted(damage: str) -> None:
    sealed = [ready(KEYS[0]), ready(KEYS[1])]
    run, allowed = "run", list[str]()
    if damage == "signature":
        sealed[1] = sealed[1][:-1] + bytes([sealed[1][-1] ^ 1])
    elif damage == "mixed lineages":
        sealed[1] = ready(KEYS[1], lineage=OTHER)
    elif damage == "twice":
        sealed[1] = ready(KEYS[0])
    elif damage == "another step":
        sealed[1] = ready(KEYS[1], t=2)
    elif damage == "weight":
        sealed[1] = ready(KEYS[1], weight=100.1)
    elif damage == "nothing":
        sealed = [ready(KEYS[0], weight=0.0), ready(KEYS[1], weight=0.0)]
    elif damage == "stranger":
        allowed = [ME, OTHERS[1]]
    else:
        run = "elsewhere"
    call = Call(t=1, attempt=0, coordinator=ME, ready=sealed, remaining_s=1.0)
    with pytest.raises(NotTrustedError):
        read_call(call, run, gate(*allowed), 100.0)
