"""From the start of a rank to its first round that counts: which phase took how long (field report D9)."""

import time
from collections.abc import Callable

from p2p_dilocox.events import Event, Phase, RoundCommitted

__all__ = ["Timeline"]


class Timeline:
    """Passes events on. After the first committed round that this cluster was in it reports the phase
    `training`, with the seconds that every phase before it took."""

    def __init__(
        self, report: Callable[[Event], None], before_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """before_s: seconds of starting that are over: of the supervisor, and of loading libraries."""
        self._report, self._now = report, now
        self._phase, self._since = "starting", now() - before_s
        self._seconds: dict[str, float] = {}
        self._counted = False

    def __call__(self, event: Event) -> None:
        self._report(event)
        if isinstance(event, Phase) and event.name == "paused":  # it comes in anew
            self._counted, self._seconds = False, {}
        if self._counted:
            return
        if isinstance(event, Phase) and event.name != self._phase:
            self._end_phase(event.name)
        elif isinstance(event, RoundCommitted) and event.included:
            self._counted = True
            self._end_phase("training")
            took = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._seconds.items())
            self._report(
                Phase(rank=event.rank, name="training", detail=f"counts since outer step {event.t} ({took})")
            )

    def _end_phase(self, name: str) -> None:
        now = self._now()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now
