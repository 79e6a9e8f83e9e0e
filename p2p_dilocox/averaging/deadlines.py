"""Every timeout of a round, derived from one setting: `deadlines.round_s` of the run spec."""

import asyncio
import time
from dataclasses import dataclass

__all__ = ["Deadline", "Timeouts"]


@dataclass(frozen=True)
class Timeouts:
    """round_s: from the moment a cluster offers its contribution to the moment it knows the outcome, in
    seconds.
    """

    round_s: float

    @property
    def roll_call_s(self) -> float:
        """How long a coordinator waits for clusters that are alive but not ready."""
        return 0.4 * self.round_s

    @property
    def closing_s(self) -> float:
        """Kept for the votes at the end of a round."""
        return 0.1 * self.round_s

    @property
    def reply_s(self) -> float:
        """After this long without a reply to a short question a peer counts as frozen."""
        return min(5.0, 0.25 * self.round_s)

    @property
    def votes_s(self) -> float:
        """How long the votes may take. All who averaged with us were done when we were."""
        return 3 * self.reply_s

    @property
    def poll_s(self) -> float:
        """A long question is answered "not yet" after this long, so that a frozen peer shows."""
        return 0.5 * self.reply_s


class Deadline:
    """A moment on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def remaining(self) -> float:
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining() == 0.0

    def within(self, seconds: float) -> float:
        """`seconds`, or what is left if that is less."""
        return min(seconds, self.remaining())

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(self.within(seconds))
