"""A volunteer of a chaos run: one `dilocox-peer join`, started again whenever it has ended."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2p_dilocox.swarm.process import die_with_parent

__all__ = ["Fault", "Volunteer", "send"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """at_s: since the faults began. seconds: until it is over, or until the cluster is started again."""

    at_s: float
    kind: str
    cluster: int
    seconds: float
    point: str = ""  # of fault_points.py, where the next start is killed


@dataclass
class Volunteer:
    """A cluster, from one start to the next; somebody who starts it again whenever it has ended."""

    number: int
    state: Path
    command: list[str]
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0
    hit: float = 0.0  # when the last fault of it was over
    fault: Fault | None = None
    point: str = ""
    usage: list[tuple[int, int]] = field(default_factory=list)
    _lines: list[Row] = field(default_factory=list)
    _read: int = 0  # bytes of its history that are in _lines
    _looked: float = 0.0

    def start(self) -> None:
        """With a fault point armed, if the last fault had one: in the outer step after next, once."""
        self.state.mkdir(exist_ok=True)
        environment = dict(os.environ)
        if self.point:
            t = max((line["t"] for line in self.history()), default=0) + 2
            environment["DILOCOX_FAULT"] = f"kill@{self.point}:{t}:{self.state / f'once-{self.starts}'}"
        self.point = ""
        with (self.state / "output").open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=die_with_parent,
            )
        self.starts += 1

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pids(self) -> list[int]:
        """The supervisor, its workers, and their p2pd."""
        found = parents = [self.process.pid] if self.process is not None and self.running else []
        while parents:
            parents = [child for pid in parents for child in children(pid)]
            found = found + parents
        return found

    def history(self) -> list[Row]:
        path = self.state / "history" / "rank0.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines

    def committed(self) -> list[Row]:
        """The outer steps it took, oldest first."""
        return [line for line in self.history() if line["decision"] != "dropped"]

    def well(self) -> bool:
        """It trains with the others again."""
        lines = self.history()
        together = lines and lines[-1]["time"] > self.hit and len(lines[-1].get("members", [])) > 1
        return self.running and self.fault is None and bool(together)

    def look(self) -> None:
        """Note the memory and the open files of all its processes, every ten seconds while it is well."""
        if not self.well() or time.monotonic() < self._looked + 10.0:
            return
        self._looked, rss, fds = time.monotonic(), 0, 0
        for pid in self.pids():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                rss += next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmRSS"))
                fds += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        self.usage.append((rss, fds))


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in reversed(pids):  # children first: a supervisor must not see them die
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def children(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, file.read_text().split())
