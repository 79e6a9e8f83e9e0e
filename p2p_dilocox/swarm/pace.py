"""How fast a rank may send: one limit for all its streams together, which take turns."""

import asyncio
import time

__all__ = ["UNLIMITED", "Pace"]

_TURNS_PER_S = 8  # so that the other side of a slow stream hears something before it takes it for frozen
_MOST_BYTES = 1 << 15  # at 1 Mbit/s a quarter of a second


class Pace:
    """bytes_per_s: at most, from one turn to the next. None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate, self._free_at = bytes_per_s, 0.0
        slow = _MOST_BYTES if bytes_per_s is None else int(bytes_per_s / _TURNS_PER_S)
        self.turn_bytes = max(1, min(_MOST_BYTES, slow))

    async def turn(self, size: int) -> None:
        """Wait until `size` more bytes may leave."""
        if self._rate is None:
            return
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + size / self._rate
        await asyncio.sleep(start - now)


UNLIMITED = Pace(None)
