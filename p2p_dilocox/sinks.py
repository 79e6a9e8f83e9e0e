"""Where events go: a file of JSON lines, or TensorBoard. The live view of a cluster is in peers/view.py."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from p2p_dilocox.errors import StateError
from p2p_dilocox.events import (
    CheckpointFailed,
    Evaluated,
    Event,
    InnerStep,
    RoundCommitted,
    RoundDropped,
    RoundStarted,
    StepSkipped,
    event_from_dict,
)
from p2p_dilocox.line_file import LineFile

__all__ = ["JsonlSink", "Sink", "TensorBoardSink", "read_events"]


_LOG = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes events, one by one, in the order they happen."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One line of JSON per event, appended at once: a killed program loses none. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, event: Event) -> None:
        self._file.write(json.dumps(event.to_dict()))

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard. Training scalars are drawn over inner steps, the others over outer steps t.

    A full disk ends the curves, not the training.
    """

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds; supervisors only need JsonlSink

        self._writer = SummaryWriter(str(directory))
        self._inner_steps = 0
        self._failed = False

    def write(self, event: Event) -> None:
        if self._failed:
            return
        try:
            for name, value, step in self._scalars(event):
                self._writer.add_scalar(name, value, step, walltime=event.time)
        except OSError as error:  # raised here for what a thread of the writer could not do before
            self._failed = True
            _LOG.warning("no more curves for TensorBoard: %s", error)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()

    def _scalars(self, event: Event) -> list[tuple[str, float, int]]:
        match event:
            case InnerStep():
                self._inner_steps += 1
                step = self._inner_steps
                return [
                    ("train/loss", event.loss, step),
                    ("train/lr", event.lr, step),
                    ("train/grad_norm", event.grad_norm, step),
                    ("train/tokens_per_s", event.tokens / max(event.seconds, 1e-9), step),
                ]
            case StepSkipped():
                return [("train/skipped_steps", event.skipped, self._inner_steps)]
            case RoundStarted():
                ratio = event.error_ratio
                return [
                    ("round/weight", event.weight, event.t),
                    ("round/delta_norm", event.norm, event.t),
                    *([("round/error_ratio", ratio, event.t)] if ratio is not None else []),
                ]
            case RoundCommitted():
                return [
                    ("round/clusters", len(event.members), event.t),
                    ("round/seconds", event.seconds, event.t),
                    ("round/waited_s", event.waited_s, event.t),
                    ("round/sent_bytes", event.sent_bytes, event.t),
                    ("round/received_bytes", event.received_bytes, event.t),
                    ("round/lowrank", event.lowrank, event.t),
                    ("round/H", event.H, event.t),
                ]
            case RoundDropped():
                return [("round/dropped", 1.0, event.t)]
            case CheckpointFailed():
                return [("checkpoint/failed", event.failed, event.t)]
            case Evaluated():
                return [("valid/loss", event.val_loss, event.t)]
        return []


def read_events(path: Path) -> Iterator[Event]:
    """The events that JsonlSink wrote to `path`, oldest first.

    A last line without its end is skipped: its writer was killed. Raises StateError for any other bad line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    return
                try:
                    yield event_from_dict(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise StateError(
                        f"{path} line {number} is not an event ({error}): {line[:80]!r}"
                    ) from error
    except OSError as error:
        raise StateError(
            f"cannot read the events in {path}: {error.strerror}. Is it a state directory?"
        ) from error
