"""What a cluster is doing, folded from the events of its ranks. Pure: no clock, no file, no process."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from p2p_dilocox.events import (
    Adapted,
    Checkpointed,
    CheckpointFailed,
    Evaluated,
    Event,
    Finished,
    InnerStep,
    Phase,
    RoundCommitted,
    RoundDropped,
    StepSkipped,
    Warned,
)
from p2p_dilocox.program import printable

__all__ = ["Progress", "RoundTotals"]

_RATE_WINDOW = 10  # inner steps over which tokens/s is taken
_LOG_LINES = 50


@dataclass(slots=True)
class RoundTotals:
    """The round of outer step t over all ranks of a cluster: sums of bytes, times of the slowest."""

    t: int
    members: list[str]
    included: bool
    lowrank: int
    H: int
    ranks: set[int] = field(default_factory=set)
    seconds: float = 0.0
    waited_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def hidden(self) -> float:
        """The part of the round's time, 0 to 1, in which training went on."""
        return max(0.0, 1 - self.waited_s / self.seconds) if self.seconds > 0 else 1.0


@dataclass(slots=True)
class Progress:
    """State of one cluster. `add` takes every event of every rank, in any order between ranks."""

    run_id: str
    cluster_id: str
    name: str
    recipe: str
    num_ranks: int
    outer_steps: int

    phase: str = "starting"
    detail: str = ""
    t: int = 0
    h: int = 0
    H: int = 0
    loss: float | None = None
    lr: float | None = None
    val_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """Training loss per outer step, the mean of its inner steps; the last one is of the step under way."""
    val_losses: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, RoundTotals] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    skipped_steps: int = 0
    failed_checkpoints: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    """Reason by rank."""
    log: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))

    _losses_of_step: list[float] = field(default_factory=list)
    _rates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))
    _waited: dict[int, float] = field(default_factory=dict)
    _before_restart: set[int] = field(default_factory=set)
    """Rounds that the ranks may take again, as they go on from a checkpoint."""
    _last_t: int = 0
    _start: float | None = None
    _end: float = 0.0

    def add(self, event: Event) -> RoundTotals | None:
        """Take one event. Returns the totals of a round when its last rank has reported the commit."""
        match event:
            case Phase() if event.rank == 0:
                if event.name == "restarting":
                    self._forget_unfinished()
                self.phase, self.detail = printable(event.name), printable(event.detail)
            case InnerStep() if (event.t, event.h) > (self.t, self.h) or self._start is None:
                self._add_inner_step(event)
            case RoundCommitted():
                return self._add_commit(event)
            case RoundDropped():
                self._wait(event.t, event.waited_s)
                if event.t not in self.dropped:
                    self.dropped[event.t] = printable(event.reason)
                    self.log.append((event.time, f"outer {event.t} dropped  {self.dropped[event.t]}"))
            case Evaluated():
                self.val_losses[event.t] = self.val_loss = event.val_loss
            case Checkpointed() if event.rank == 0:
                self.log.append((event.time, f"checkpoint of outer step {event.t} in {event.seconds:.1f} s"))
            case CheckpointFailed():
                self.failed_checkpoints = max(self.failed_checkpoints, event.failed)
                self.log.append((event.time, printable(event.message, 400)))
            case StepSkipped() if event.rank == 0:
                self.skipped_steps += 1
                self.t, self.h, self.H = max((self.t, self.h), (event.t, event.h)) + (event.H,)
                self.log.append((event.time, printable(event.message, 400)))
            case Adapted():
                self.log.append((event.time, f"outer {event.t}  {printable(event.message, 400)}"))
            case Warned():
                self.log.append((event.time, f"rank {event.rank}: {printable(event.message, 400)}"))
            case Finished():
                self.finished[event.rank] = event.reason
                self._last_t = max(self._last_t, event.t)
                if event.rank == 0:
                    self.phase, self.detail = event.reason, ""
                self.digests.update(event.parameter_digests)
        return None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = sum(s for _, s in self._rates)
        return sum(n for n, _ in self._rates) / seconds if seconds > 0 else None

    @property
    def rest_of_outer_step_s(self) -> float:
        """How long the inner steps that are left usually take; 0 before the first."""
        return (self.H - self.h) * sum(s for _, s in self._rates) / max(len(self._rates), 1)

    @property
    def committed(self) -> int:
        """The last outer step taken; 0 before the first."""
        return max(self._last_t, max(self.rounds, default=0))

    @property
    def last_round(self) -> RoundTotals | None:
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def utilisation(self) -> float | None:
        """The part of the time since the first inner step in which the cluster did not wait for a round."""
        if self._start is None or self._end <= self._start:
            return None
        return max(0.0, 1 - sum(self._waited.values()) / (self._end - self._start))

    def to_dict(self) -> dict[str, Any]:
        """What `dilocox-peer status` shows; plain JSON values, null for what is unknown or not finite."""
        last = self.last_round
        return {
            "run_id": self.run_id,
            "cluster_id": self.cluster_id,
            "name": self.name,
            "recipe": self.recipe,
            "ranks": self.num_ranks,
            "phase": self.phase,
            "detail": self.detail,
            "t": self.t,
            "outer_steps": self.outer_steps,
            "committed": self.committed,
            "h": self.h,
            "H": self.H,
            "loss": _finite(self.loss),
            "val_loss": _finite(self.val_loss),
            "lr": self.lr,
            "tokens_per_s": self.tokens_per_s,
            "members": last.members if last else [],
            "lowrank": last.lowrank if last else None,
            "sent_bytes_last_round": last.sent_bytes if last else 0,
            "received_bytes_last_round": last.received_bytes if last else 0,
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "utilisation": self.utilisation,
            "dropped_rounds": len(self.dropped),
            "skipped_steps": self.skipped_steps,
            "failed_checkpoints": self.failed_checkpoints,
            "parameter_digests": {str(stage): digest for stage, digest in sorted(self.digests.items())},
        }

    def _add_inner_step(self, event: InnerStep) -> None:
        if event.t != self.t or not self.losses:
            self._losses_of_step = []
            self.losses.append(event.loss)
        self._losses_of_step.append(event.loss)
        self.losses[-1] = sum(self._losses_of_step) / len(self._losses_of_step)
        self.t, self.h, self.H = event.t, event.h, event.H
        self.loss, self.lr = event.loss, event.lr
        self._rates.append((event.tokens, event.seconds))
        if self._start is None:
            self._start = event.time - event.seconds
        self._end = max(self._end, event.time)

    def _add_commit(self, event: RoundCommitted) -> RoundTotals | None:
        members = [printable(member, 64) for member in event.members]
        if event.t in self._before_restart:
            self._before_restart.remove(event.t)
            del self.rounds[event.t]
        totals = self.rounds.setdefault(
            event.t, RoundTotals(event.t, members, event.included, event.lowrank, event.H)
        )
        if event.rank in totals.ranks:
            return None
        totals.ranks.add(event.rank)
        totals.seconds = max(totals.seconds, event.seconds)
        totals.waited_s = max(totals.waited_s, event.waited_s)
        totals.sent_bytes += event.sent_bytes
        totals.received_bytes += event.received_bytes
        self.sent_bytes += event.sent_bytes
        self.received_bytes += event.received_bytes
        self.digests.update(event.parameter_digests)
        self._wait(event.t, event.waited_s)
        self._end = max(self._end, event.time)
        return totals if len(totals.ranks) == self.num_ranks else None

    def _forget_unfinished(self) -> None:
        """The ranks go on from a checkpoint, which may be some steps back: take what they report as new."""
        self.t = self.h = 0
        self.finished.clear()
        self._rates.clear()
        self.rounds = {t: totals for t, totals in self.rounds.items() if len(totals.ranks) == self.num_ranks}
        self._before_restart = set(self.rounds)

    def _wait(self, t: int, waited_s: float) -> None:
        self._waited[t] = max(self._waited.get(t, 0.0), waited_s)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
