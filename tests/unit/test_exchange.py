"""Who is to blame for a failed averaging: four members with a stream between each two, in one process."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from p2p_dilocox.averaging.butterfly import Butterfly, Terms
from p2p_dilocox.averaging.exchange import Budget, Exchange, Traffic
from p2p_dilocox.averaging.fault import Aborted, MemberFault
from p2p_dilocox.compression import Piece
from p2p_dilocox.swarm.stream import Frame, Stream

MEMBERS, SLOW, VALUES = 4, 3, 64
PARTS = [[Piece(m * VALUES, (m + 1) * VALUES, 4, 4)] for m in range(MEMBERS)]


async def pair(a: int, b: int) -> tuple[Stream, Stream]:
    """Both ends of a stream between members a and b: what a holds, what b holds."""
    ends = [await asyncio.open_connection(sock=sock) for sock in socket.socketpair()]
    return Stream(str(b), *ends[0]), Stream(str(a), *ends[1])


async def run_round(delivered_to: set[int]) -> list[BaseException]:
    """Member 0 is the first that no longer waits. What the others end with; SLOW has delivered to some."""
    streams: dict[tuple[int, int], Stream] = {}
    for a in range(MEMBERS):
        for b in range(a):
            streams[a, b], streams[b, a] = await pair(a, b)
    with ThreadPoolExecutor(1) as codec:

        def averaging(me: int) -> Butterfly:
            made = Butterfly(
                PARTS, Terms(torch.float32, [1.0] * MEMBERS, [100.0] * MEMBERS, me, VALUES, codec)
            )
            made.set_vector(torch.ones(MEMBERS * VALUES))
            return made

        async def member(me: int) -> None:
            async def dial(peer: str) -> Stream:
                return streams[me, int(peer)]

            dials = [None if m == me else True for m in range(MEMBERS)]
            budget = Budget(usual_s=0.5 if me == 0 else 30.0, limit_s=60.0, stall_s=0.9)
            await Exchange([averaging(me)], list("0123"), dials, dial, Traffic(), budget).run()

        async def slow(other: int) -> None:
            """It is alive, and says so."""
            stream, contributions = streams[SLOW, other], averaging(SLOW).contributions(other)
            if other in delivered_to:
                async for data in contributions:
                    await stream.send(Frame.CONTRIBUTION, data, 5.0)
            while True:
                await stream.send(Frame.WAIT, b"", 5.0)
                await asyncio.sleep(0.1)

        others = [m for m in range(MEMBERS) if m != SLOW]
        talking = [asyncio.create_task(slow(m)) for m in others]
        ends = await asyncio.gather(*(member(m) for m in others), return_exceptions=True)
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        for stream in streams.values():
            stream.close()
    return [end for end in ends if end is not None]


def test_who_is_late_for_all_is_named_by_all() -> None:
    """So that one on a slow link, which takes its accuser for dead, does not have it put out instead."""
    for end in asyncio.run(run_round(delivered_to=set())):
        assert isinstance(end, MemberFault) and end.member == SLOW, repr(end)


@pytest.mark.parametrize("delivered_to", [{1, 2}, {1}])
def test_nobody_repeats_an_accusation_that_it_has_not_seen_to_be_true(delivered_to: set[int]) -> None:
    accuser, *rest = asyncio.run(run_round(delivered_to))
    assert isinstance(accuser, MemberFault) and accuser.member == SLOW
    for member, end in enumerate(rest, 1):
        if member in delivered_to:
            assert isinstance(end, Aborted) and end.suspect == SLOW, repr(end)
        else:
            assert isinstance(end, MemberFault) and end.member == SLOW, repr(end)


async def behind_a_slow_link(takes_after_s: float) -> BaseException | None:
    """What an exchange of two ends with when the other speaks all the time, but takes nothing for a while."""
    parts = [[Piece(m << 21, (m + 1) << 21, 4, 4)] for m in range(2)]  # a megabyte: no socket holds it
    streams = await pair(0, 1)
    with ThreadPoolExecutor(1) as codec:

        def exchange(me: int) -> Exchange:
            made = Butterfly(parts, Terms(torch.float32, [1.0] * 2, [1e6] * 2, me, VALUES, codec))
            made.set_vector(torch.ones(2 << 21))

            async def dial(_peer: str) -> Stream:
                return streams[me]

            dials = [None if m == me else True for m in range(2)]
            return Exchange([made], list("01"), dials, dial, Traffic(), Budget(20.0, 30.0, stall_s=0.5))

        async def other() -> None:
            for _ in range(int(takes_after_s / 0.1)):
                await streams[1].send(Frame.WAIT, b"", 5.0)
                await asyncio.sleep(0.1)
            await exchange(1).run()

        taking = asyncio.create_task(other())
        (end,) = await asyncio.gather(exchange(0).run(), return_exceptions=True)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        for stream in streams:
            stream.close()
    return end


def test_who_speaks_but_takes_nothing_for_a_while_is_not_taken_for_frozen() -> None:
    """Behind a slow link of ours, which others share, a stream may stand still for some seconds."""
    assert asyncio.run(behind_a_slow_link(takes_after_s=1.2)) is None


def test_who_speaks_but_takes_nothing_for_long_is_named() -> None:
    end = asyncio.run(behind_a_slow_link(takes_after_s=60.0))
    assert isinstance(end, MemberFault) and end.member == 1, repr(end)
    assert "took nothing for 2.0 s" in str(end)
