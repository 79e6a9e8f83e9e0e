"""How a round ended, as the training loop gets it."""

import concurrent.futures
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dilocox.outer import Average

__all__ = ["OuterStep", "Outcome", "Round"]

_GLANCE_S = 0.2  # how often a waiting training loop looks whether it should leave


@dataclass(frozen=True)
class OuterStep:
    """A committed round, as this rank applies it. `own` is None if we were not in it.

    weights, norms: as the members announced them, in their order. weight_cap: the most a member may announce.
    lowrank, H: of each stage, and of the outer steps that follow, as the members have agreed (`Roster`).
    """

    t: int
    members: list[str]
    weights: list[float]
    parent: str
    digest: str
    stage_digests: dict[int, str]
    average: Average
    own: Average | None
    norms: list[float] = field(default_factory=list)
    weight_cap: float = math.inf
    lowrank: list[int] = field(default_factory=list)
    H: int = 0


@dataclass(frozen=True)
class Outcome:
    """How the round of outer step t ended. No steps: it was dropped, by every cluster, for `reason`."""

    t: int
    steps: list[OuterStep] = field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    attempts: int = 1
    failed: bool = False  # this cluster cannot go on from its state
    refused: bool = False  # because the others refuse it
    drifted: bool = False  # because its anchor is not that of the others
    notes: list[str] = field(default_factory=list)  # who was left out and why


class Round:
    """A round in the background."""

    def __init__(self, t: int, future: "concurrent.futures.Future[Outcome]") -> None:
        self.t = t
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self, give_up: Callable[[], bool]) -> Outcome | None:
        """The outcome, or None once `give_up` says so. Never raises
        because a peer died, never later than the deadline."""
        while True:
            try:
                return self._future.result(_GLANCE_S)
            except concurrent.futures.TimeoutError:
                if give_up():
                    self._future.cancel()
                    return None
