"""All that a rank trains with, and where it is in the run. The loop over it is trainer.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from p2p_dilocox.adapting import Adapting
from p2p_dilocox.anchor_mean import AnchorMean
from p2p_dilocox.averaging.company import Progress
from p2p_dilocox.averaging.outcome import Round
from p2p_dilocox.averaging.round import Rounds
from p2p_dilocox.backlog import Backlog
from p2p_dilocox.data import Batches
from p2p_dilocox.data_share import DataShare
from p2p_dilocox.error_alarm import ErrorAlarm
from p2p_dilocox.events import Event
from p2p_dilocox.gradient_sum import GradientSum
from p2p_dilocox.history import History
from p2p_dilocox.inner import InnerOptimizer
from p2p_dilocox.local_outer import LocalOuter
from p2p_dilocox.outer import OuterState
from p2p_dilocox.pipeline import Pipeline
from p2p_dilocox.wish import Wish

__all__ = ["Checkpoints", "Rank"]


class Checkpoints(Protocol):
    def save(self, rank: "Rank") -> None: ...
    def wait(self) -> None: ...
    def set_aside(self) -> Path: ...


@dataclass
class Rank:
    """All that a rank trains with, and where it is."""

    index: int
    cluster_id: str
    pipeline: Pipeline
    inner: InnerOptimizer | GradientSum
    outer: OuterState
    rounds: Rounds
    batches: Batches
    progress: Progress
    history: History
    checkpoints: Checkpoints
    wish: Wish
    report: Callable[[Event], None]
    t: int = 1  # the outer step in progress
    h: int = 0  # its inner steps already done
    pending: Round | None = None  # on the wire; a joiner follows the one that started before it came
    unsent_tokens: int = 0
    wanted: int = Wish.STAY  # what the ranks agreed on at the last inner step
    skipped: int = 0  # inner steps whose loss or gradient was not finite
    dropped: int = 0  # rounds, in a row
    lost_at: int = -1  # the last committed step when this cluster last looked where the others are
    alarm: ErrorAlarm = field(default_factory=ErrorAlarm)
    backlog: Backlog = field(default_factory=Backlog)
    share: DataShare | None = None  # None: random windows
    local: LocalOuter | None = None  # outer steps of this cluster alone
    H: int = 1  # inner steps of the outer step in progress
    adapting: Adapting | None = None
    step_s: float | None = None  # of a simulated inner step; None: as it is measured
    anchors: AnchorMean | None = None  # the last ones, whose mean is validated
