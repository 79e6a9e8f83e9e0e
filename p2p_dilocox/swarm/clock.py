"""Is this machine's clock right? Records in the DHT expire by wall clock, so peers must agree within 3 s.

Nobody's clock is the right one by itself: ours is wrong if most peers say so, or if it has jumped.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable

__all__ = ["MOST_S", "Clock", "clock_error", "refused_for_its_clock"]

MOST_S = 3.0  # hivemind's MAX_DHT_TIME_DISCREPANCY_SECONDS
_TIMES = re.compile(r"local: ([0-9.]+), peer: ([0-9.]+)")


def clock_error(ahead_s: float) -> str:
    """ahead_s: seconds that our clock is ahead of the others'."""
    where = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"this machine's clock is {abs(ahead_s):.1f} s {where} the swarm's, "
        f"at most {MOST_S:.0f} s are allowed. Set it by NTP (timedatectl set-ntp true, or chronyc makestep)"
    )


def refused_for_its_clock(message: str) -> str | None:
    """The sentence for hivemind's refusal of a machine whose clock is off; None if that was not why."""
    times = _TIMES.search(message)
    return clock_error(float(times[1]) - float(times[2])) if times else None


class Clock:
    """Compares our clock with those of peers, now and then."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._start = now() - time.monotonic()

    @property
    def jumped_s(self) -> float:
        """How far our clock has been set forward since we started."""
        return self._now() - time.monotonic() - self._start

    async def ahead_of(self, ask: Callable[[], Awaitable[float | None]]) -> float | None:
        """Seconds that we are ahead of a peer. ask: its time, None if it does not answer."""
        before = self._now()
        theirs = await ask()
        after = self._now()
        if theirs is None:
            return None
        return before - theirs if theirs < before else after - theirs if theirs > after else 0.0

    async def fault(self, peers: Iterable[Callable[[], Awaitable[float | None]]]) -> str:
        """What is wrong with our clock, as a sentence; "" if nothing is, or nobody can know."""
        answers = await asyncio.gather(*(self.ahead_of(ask) for ask in peers))
        known = sorted(a for a in answers if a is not None)
        wrong = [a for a in known if abs(a) > MOST_S]
        most = len(known) > 1 and 2 * len(wrong) > len(known)
        if wrong and (most or abs(self.jumped_s) > MOST_S):
            return clock_error(wrong[len(wrong) // 2])
        return ""
