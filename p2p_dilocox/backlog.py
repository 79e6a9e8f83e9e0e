"""How much of its movement a cluster sends at once when the last rounds went on without it.

What was not delivered adds up. After some rounds it is longer than any pseudo-gradient may be (rule V5), and
others would leave the cluster out for that too, for good. So it sends a part that is let in, and the rest
waits, as what rounding leaves over does.
"""

from p2p_dilocox.averaging.exclusion import NormCap
from p2p_dilocox.averaging.outcome import OuterStep

__all__ = ["Backlog"]

_OF_CAP = 0.5  # others may know other rounds than we do


class Backlog:
    def __init__(self) -> None:
        self._usual, self._delivered, self._more = NormCap(), False, False

    def learn(self, step: OuterStep, *, delivered: bool) -> None:
        """A committed outer step; delivered: whether it has our contribution."""
        self._usual.remember([n for n, w in zip(step.norms, step.weights, strict=False) if w > 0])
        self._delivered = self._delivered or delivered

    def part(self, norm: float) -> float:
        """In (0, 1]: of a contribution of this norm, of the whole model. 1 if all of the last one was
        delivered: a movement that grows because H does is everybody's."""
        waited, self._delivered = self._more or not self._delivered, False
        limit = _OF_CAP * self._usual.cap([])
        self._more = waited and norm > limit
        return limit / norm if self._more else 1.0
