"""When a volunteer's machine is not to train: hours of the day, bytes of the month, heat of its GPUs.

The supervisor asks once a second; the answer is a `Pause` with a reason that `status` shows, or None.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from p2p_dilocox.errors import SpecError, StateError
from p2p_dilocox.plan.units import parse_bytes
from p2p_dilocox.state_dir import write_atomic

from .gpu import hottest_c
from .view import bytes_text

__all__ = ["Caps", "Hours", "Limits", "Month", "Pause", "read_limits", "traffic_of"]

_COOLER_C = 10  # it goes on when it is this much below the limit: else it would start and stop all the time
_SAVE_S = 10.0
_LEAST_RATE = 64_000  # bytes/s


@dataclass(frozen=True, slots=True)
class Pause:
    """now: without finishing the outer step."""

    reason: str
    now: bool


@dataclass(frozen=True, slots=True)
class Hours:
    """Windows of the day, local time, in minutes since midnight [from, to). One that ends before it starts
    goes across midnight."""

    windows: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """ "22:00-07:00" or several, "12:00-13:00,22:00-07:00". Raises SpecError."""
        windows = []
        for part in text.split(","):
            found = re.fullmatch(r"\s*(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s*", part)
            times = [int(n) for n in found.groups()] if found else [99]
            if not found or max(times[::2]) > 24 or max(times[1::2]) > 59:
                raise SpecError(f'hours {text!r}: write them as "22:00-07:00", several with commas.')
            start, end = 60 * times[0] + times[1], 60 * times[2] + times[3]
            if start == end or max(start, end) > 24 * 60:
                raise SpecError(f"hours {text!r}: {part.strip()} is no part of a day.")
            windows.append((start, end))
        return cls(tuple(windows))

    def open_at(self, when: datetime.datetime) -> bool:
        now = 60 * when.hour + when.minute
        return any(a <= now < b if a < b else now >= a or now < b for a, b in self.windows)

    def __str__(self) -> str:
        return ", ".join("-".join(f"{m // 60:02}:{m % 60:02}" for m in window) for window in self.windows)


def traffic_of(p2pds: Iterable[int]) -> dict[int, int]:
    """Bytes that each p2pd process has sent and received so far; 0 where /proc does not tell.

    It hands on all that it takes, between its sockets to other peers and one to our process: every byte on
    the network is read once and written once. What encryption and headers add shows on the interface only:
    0.5 % more was counted there for rounds of 4 MB, 27 % more for hardly more than heartbeats.
    """
    return {pid: _copied(pid) // 2 for pid in p2pds}


def _copied(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(lines["rchar"]) + int(lines["wchar"])
    return 0


class Month:
    """Bytes sent and received in this calendar month, kept in STATE/month.json from one start to the next."""

    def __init__(self, path: Path, when: datetime.datetime) -> None:
        self._path, self.name, self.bytes = path, f"{when:%Y-%m}", 0
        self._seen: dict[int, int] = {}
        self._saved_at, self._saved_bytes = when, 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["month"] == self.name:
                self.bytes = self._saved_bytes = int(kept["bytes"])

    def count(self, traffic: dict[int, int], when: datetime.datetime) -> None:
        """traffic: of the processes that run now, see traffic_of. Raises StateError on a full disk."""
        if self.name != (name := f"{when:%Y-%m}"):
            self.name, self.bytes = name, 0
        self.bytes += sum(max(0, total - self._seen.get(pid, 0)) for pid, total in traffic.items())
        self._seen = traffic
        if self.bytes != self._saved_bytes and (when - self._saved_at).total_seconds() >= _SAVE_S:
            self.save(when)

    def save(self, when: datetime.datetime) -> None:
        self._saved_at, self._saved_bytes = when, self.bytes
        write_atomic(self._path, json.dumps({"month": self.name, "bytes": self.bytes}) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """None: no such limit. upload_rate: bytes per second."""

    hours: Hours | None = None
    upload_rate: int | None = None
    month_bytes: int | None = None
    gpu_c: int | None = None


def read_limits(
    hours: str | None, upload_rate: str | None, month_bytes: str | None, gpu_c: int | None
) -> Caps:
    """As they are written in a profile or on the command line. Raises SpecError."""
    caps = Caps(
        hours=None if hours is None else Hours.parse(hours),
        upload_rate=None if upload_rate is None else round(parse_bytes(upload_rate)),
        month_bytes=None if month_bytes is None else round(parse_bytes(month_bytes)),
        gpu_c=gpu_c,
    )
    if caps.upload_rate is not None and caps.upload_rate < _LEAST_RATE:
        raise SpecError(
            f"upload rate {upload_rate}, must be at least {bytes_text(_LEAST_RATE)} per second: "
            "with less the others would take this cluster for frozen."
        )
    if gpu_c is not None and not 30 <= gpu_c <= 110:
        raise SpecError(f"gpu_c = {gpu_c}, must be between 30 and 110 (degrees Celsius).")
    return caps


class Limits:
    """Looks at clock, counters and driver."""

    def __init__(
        self,
        state: Path,
        caps: Caps,
        *,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        heat: Callable[[], int | None] = hottest_c,
    ) -> None:
        self._caps = caps
        self._clock, self._heat, self._hot = clock, heat, False
        self.month = Month(state / "month.json", clock())

    def look(self, p2pds: Iterable[int]) -> Pause | None:
        """Why the cluster is not to train now. p2pds: the processes whose bytes count."""
        caps, when = self._caps, self._clock()
        with contextlib.suppress(StateError):  # said elsewhere: status.json is on the same disk
            self.month.count(traffic_of(p2pds), when)
        if caps.month_bytes is not None and self.month.bytes >= caps.month_bytes:
            used, most = bytes_text(self.month.bytes), bytes_text(caps.month_bytes)
            return Pause(f"{used} of {most} used in {self.month.name}", now=True)
        if caps.gpu_c is not None and (reason := self._too_hot(caps.gpu_c)):
            return Pause(reason, now=True)
        if caps.hours is not None and not caps.hours.open_at(when):
            return Pause(f"outside {caps.hours}", now=False)
        return None

    def close(self) -> None:
        with contextlib.suppress(StateError):
            self.month.save(self._clock())

    def _too_hot(self, limit_c: int) -> str:
        heat = self._heat()
        if heat is None:
            return ""
        self._hot = heat >= (limit_c - _COOLER_C if self._hot else limit_c)
        return (
            f"a GPU has {heat} °C, from {limit_c} on it rests until {limit_c - _COOLER_C}"
            if self._hot
            else ""
        )
