"""Whose clock is wrong: ours, if most say so or it has jumped; a single other clock may be the wrong one."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from p2p_dilocox.swarm.clock import Clock, clock_error, refused_for_its_clock


class Hands:
    """A clock that can be set."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def peer(ahead_s: float | None) -> Callable[[], Awaitable[float | None]]:
    async def answer() -> float | None:
        return None if ahead_s is None else time.time() + ahead_s

    return answer


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        (0.0, [0.0, 0.0], ""),
        (1.0, [0.0, -1.0], ""),  # within 3 s
        (10.0, [0.0, 0.0, 0.0], "10.0 s ahead of"),
        (-10.0, [0.0, 0.0], "10.0 s behind"),
        (3600.0, [0.0], "3600.0 s ahead of"),  # it has jumped, so one witness is enough
        (0.0, [10.0], ""),  # one against one, and ours has run on: nobody can know
        (0.0, [10.0, 0.0, 0.0], ""),  # it is that peer's
        (0.0, [10.0, 10.0, 0.0], "10.0 s behind"),
        (10.0, [None, None], ""),  # nobody to ask
    ],
)
def test_most_clocks_decide(ours: float, theirs: list[float | None], found: str) -> None:
    hands = Hands()
    clock = Clock(hands)
    hands.ahead_s = ours
    fault = asyncio.run(clock.fault([peer(ahead) for ahead in theirs]))
    assert (found in fault) if found else not fault
    assert not fault or "NTP" in fault


def test_a_refusal_by_hivemind_becomes_a_sentence_with_the_offset() -> None:
    """Field report A2. The text is hivemind's, as its protocol.py raises it."""
    text = "local time must be within 3 seconds  of others(local: 1700000010.50000, peer: 1700000000.00000)"
    assert refused_for_its_clock(text) == clock_error(10.5)
    assert "10.5 s ahead of the swarm's" in clock_error(10.5)
    assert refused_for_its_clock("Peer x can't access this node") is None
