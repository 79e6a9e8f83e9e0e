"""What a rank reports while it works. Plain values only: every event is one line of JSON.

Sinks (sinks.py) write events to files; the live view (peers/view.py) draws them.
"""

import time
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

__all__ = [
    "Adapted",
    "CheckpointFailed",
    "Checkpointed",
    "Evaluated",
    "Event",
    "Finished",
    "InnerStep",
    "Phase",
    "RoundCommitted",
    "RoundDropped",
    "RoundStarted",
    "ShardTrained",
    "StepSkipped",
    "Warned",
    "event_from_dict",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """`time` is Unix seconds; `rank` is the process in its cluster."""

    kind: ClassVar[str] = ""
    rank: int = 0
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Event):
    """Where a rank is: connecting, starting, resumed, waiting, downloading, verifying, catching up, warming
    up, training, paused, draining, leaving, done."""

    kind: ClassVar[str] = "phase"
    name: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerStep(Event):
    """One inner step of the whole cluster. `loss` is nats per token; `tokens` were trained in `seconds`."""

    kind: ClassVar[str] = "inner_step"
    t: int
    h: int
    H: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSkipped(Event):
    """Loss or gradient of an inner step was not finite: no optimizer step, and the cluster is back at the
    anchor. `skipped` counts these steps since the rank has started; `message` says it in a sentence."""

    kind: ClassVar[str] = "step_skipped"
    t: int
    h: int
    H: int
    skipped: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTrained(Event):
    """What the cluster trained on in outer step t, whose round has landed: part `shard` mod num_shards of the
    data, in pass `shard` div num_shards."""

    kind: ClassVar[str] = "shard_trained"
    t: int
    shard: int
    num_shards: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundStarted(Event):
    """What the cluster offers, all ranks together. `weight`: tokens. `norm`: L2 norm of the pseudo-gradient.

    `error_ratio`: norm of the error buffer in it over that of the movement since the last boundary; None
    after a dropped round, or if nothing moved.
    """

    kind: ClassVar[str] = "round_started"
    t: int
    weight: float
    norm: float
    error_ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCommitted(Event):
    """Outer step t was taken. Byte counts are this rank's own, as written to and read from sockets.

    `seconds` from start to commit; `waited_s` of them the training loop stood still. The digests, sha256 of
    each stage's anchor, are there when the run spec has this outer step evaluated.
    """

    kind: ClassVar[str] = "round_committed"
    t: int
    members: list[str]
    included: bool
    seconds: float
    waited_s: float
    sent_bytes: int
    received_bytes: int
    lowrank: int
    H: int
    parameter_digests: dict[int, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundDropped(Event):
    kind: ClassVar[str] = "round_dropped"
    t: int
    reason: str
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Event):
    """Validation loss (nats per token) of the anchor after outer step t; and of the mean of the last anchors,
    if the run asks for it and there are two."""

    kind: ClassVar[str] = "evaluated"
    t: int
    val_loss: float
    mean_val_loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointed(Event):
    kind: ClassVar[str] = "checkpointed"
    t: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed(Event):
    """Outer step t was not saved. `failed` counts these since the rank has started; `message` says why."""

    kind: ClassVar[str] = "checkpoint_failed"
    t: int
    failed: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted(Event):
    """Outer step t was the first of another rank, or leads to another H; `message` says from what to what,
    and why. lowrank: of every stage. H: of the outer steps that follow."""

    kind: ClassVar[str] = "adapted"
    t: int
    lowrank: list[int]
    H: int
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(Event):
    kind: ClassVar[str] = "warned"
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Event):
    """`reason`: complete, left, failed. `parameter_digests`: sha256 of each stage's anchor."""

    kind: ClassVar[str] = "finished"
    t: int
    reason: str
    parameter_digests: dict[int, str]


_EVENTS: dict[str, type[Event]] = {
    e.kind: e
    for e in (
        Phase, InnerStep, ShardTrained, StepSkipped, RoundStarted, RoundCommitted, RoundDropped, Evaluated,
        Checkpointed, CheckpointFailed, Adapted, Warned, Finished,
    )
}  # fmt: skip


def event_from_dict(record: dict[str, Any]) -> Event:
    """The event that `to_dict` wrote. Raises KeyError or TypeError for anything else."""
    fields = dict(record)
    event = _EVENTS[fields.pop("kind")](**fields)
    digests = getattr(event, "parameter_digests", None)
    if digests:  # JSON turned the stage numbers into strings
        object.__setattr__(event, "parameter_digests", {int(k): v for k, v in digests.items()})
    return event
