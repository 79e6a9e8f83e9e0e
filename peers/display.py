"""What a person sees while a cluster trains: a live view on a terminal, one line per outer step elsewhere."""

import errno
import time
from collections.abc import Callable
from typing import Protocol

import click
from rich.console import Console, RenderableType
from rich.live import Live

from p2p_dilocox.events import (
    Adapted,
    CheckpointFailed,
    Evaluated,
    Event,
    Phase,
    RoundDropped,
    StepSkipped,
    Warned,
)

from .progress import Progress, RoundTotals
from .view import phase_line, round_line

__all__ = ["Display", "LiveDisplay", "PlainDisplay"]

_FRAME_S = 0.25
_REPEAT_S = 10.0  # a phase whose detail counts seconds is printed this often


class Display(Protocol):
    def event(self, progress: Progress, event: Event, totals: RoundTotals | None) -> None:
        """After `progress.add(event)` returned `totals`."""
        ...

    def tick(self) -> None:
        """Called some times a second."""
        ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class LiveDisplay:
    """Redraws `view` a few times a second, in the caller's thread: no other thread may live when we fork."""

    def __init__(self, console: Console, view: RenderableType) -> None:
        self._live = Live(view, console=console, auto_refresh=False, screen=False, vertical_overflow="crop")
        self._live.start()
        self._next = 0.0

    def event(self, progress: Progress, event: Event, totals: RoundTotals | None) -> None:
        if totals is not None:
            progress.log.append((event.time, round_line(progress, totals)))

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _FRAME_S
            self._live.refresh()

    def say(self, line: str) -> None:
        self._live.console.print(line)

    def close(self) -> None:
        self._live.refresh()
        self._live.stop()


class PlainDisplay:
    """Lines for a log file: phases, warnings, and one line per outer step. `prefix` names the cluster."""

    def __init__(self, write: Callable[[str], None] = click.echo, prefix: str = "") -> None:
        self._write = write
        self._prefix = prefix
        self._phase = ""
        self._phase_time = 0.0

    def event(self, progress: Progress, event: Event, totals: RoundTotals | None) -> None:
        if totals is not None:
            self.say(round_line(progress, totals))
        match event:
            case Phase() if event.rank == 0:
                if event.name != self._phase or event.time >= self._phase_time + _REPEAT_S:
                    self._phase, self._phase_time = event.name, event.time
                    self.say(phase_line(progress))
            case Evaluated() if event.rank == 0:
                mean = event.mean_val_loss
                more = "" if mean is None else f"  of the mean of the last anchors {mean:.3f}"
                self.say(f"outer {event.t} evaluated  val loss {event.val_loss:.3f}{more}")
            case RoundDropped() if event.rank == 0:
                self.say(f"outer {event.t} dropped  {progress.dropped[event.t]}")
            case StepSkipped() if event.rank == 0:
                self.say(progress.log[-1][1])
            case Adapted() | Warned() | CheckpointFailed():
                self.say(progress.log[-1][1])

    def tick(self) -> None: ...

    def say(self, line: str) -> None:
        try:
            self._write(f"{self._prefix}{line}")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a log on a full disk must not end a cluster
                raise

    def close(self) -> None: ...
