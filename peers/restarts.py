"""When a cluster that failed is started again, and how long after."""

from collections import deque

from p2p_dilocox.errors import (
    DataError,
    DilocoxError,
    LinkError,
    ModelError,
    NotTrustedError,
    SpecError,
    StateError,
)

__all__ = ["HOPELESS", "MAX_RESTARTS", "WINDOW_S", "Restarts"]

MAX_RESTARTS = 5
WINDOW_S = 600.0

HOPELESS: dict[int, type[DilocoxError]] = {
    kind.exit_code: kind
    for kind in (SpecError, LinkError, NotTrustedError, StateError, ModelError, DataError)
}
"""Exit statuses of ranks, with their errors, that another start would only show again."""


class Restarts:
    """Counts restarts: MAX_RESTARTS in any WINDOW_S seconds, after a pause that doubles each time."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts in the window, the one just granted among them."""
        return len(self._times)

    def pause_s(self, now: float) -> float | None:
        """Seconds until the cluster may start again: 1, 2, 4 ...; None: it may not. now: monotonic."""
        while self._times and self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if len(self._times) == MAX_RESTARTS:
            return None
        self._times.append(now)
        return float(2 ** (len(self._times) - 1))
