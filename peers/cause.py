"""Why a rank has ended, as far as its supervisor can tell."""

import signal
from pathlib import Path

from p2p_dilocox.errors import OutOfMemoryError

__all__ = ["FROZEN_S", "Silence", "kills_for_memory", "status_text"]

FROZEN_S = 15.0
_AWAKE_S = 1.0


class Silence:
    """How long a rank has neither said a word nor used its processor.

    A rank speaks every second, see worker.py. One that cannot, because a library keeps Python's lock,
    computes; one that is stopped or waits for a dead disk does not. Only time in which the supervisor itself
    was awake counts: a machine that slept has frozen nobody.
    """

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self.end()

    def end(self) -> None:
        """It has spoken."""
        self._seconds, self._ticks = 0.0, -1

    def goes_on(self, seconds: float) -> bool:
        """So many more seconds of it. True: the rank is frozen."""
        self._seconds += min(seconds, _AWAKE_S)
        if self._seconds < FROZEN_S / 3:
            return False
        ticks = self._processor_ticks()
        if self._ticks != ticks:
            self._seconds, self._ticks = FROZEN_S / 3, ticks
        return self._seconds > FROZEN_S

    def _processor_ticks(self) -> int:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return -2
        return int(fields[11]) + int(fields[12])


def kills_for_memory() -> int:
    """Processes that this machine's kernel has killed for lack of memory, since it started."""
    try:
        counters = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), 0)


def status_text(code: int, *, frozen: bool = False, memory_short: bool = False) -> str:
    """`code` as subprocess gives it, as the end of a sentence.

    frozen: it was killed for that. memory_short: the kernel has killed for lack of memory meanwhile.
    """
    if frozen:
        return f"froze: for {FROZEN_S:.0f} s it neither spoke nor used its processor, and was killed"
    if code == -signal.SIGKILL and memory_short:
        return "was killed by the kernel, as this machine is out of memory"
    if code == OutOfMemoryError.exit_code:
        return "ran out of memory"
    name = signal.Signals(-code).name if code < 0 else ""
    return f"ended with signal {name}" if name else f"ended with exit status {code}"
