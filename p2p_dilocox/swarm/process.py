"""Children die with their parent, also when it is killed."""

import ctypes
import signal

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: dlopen in a forked child may deadlock


def die_with_parent() -> None:
    """Ask Linux to SIGKILL this process when the thread that started it ends. Safe in a forked child before
    exec.

    The setting survives exec. It does nothing where prctl does not exist.
    """
    prctl = getattr(_libc, "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
