"""How a round ended, as the training loop gets it."""

import math
from dataclasses import dataclass, field

from p2p_dilocox.outer import Average

__all__ = ["OuterStep", "Outcome"]


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
    drifted: bool = False  # because its anchor is not that of the others
    notes: list[str] = field(default_factory=list)  # who was left out and why
