"""What a process must not leave behind: children and sockets, also when it is killed."""

import ctypes
import os
import shutil
import signal
import tempfile
from pathlib import Path

__all__ = ["die_with_parent", "make_socket_dir", "remove_sockets_of"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: dlopen in a forked child may deadlock


def die_with_parent() -> None:
    """Ask Linux to SIGKILL this process when the thread that
    started it ends. Safe in a forked child before exec.

    The setting survives exec. It does nothing where prctl does not exist.
    """
    prctl = getattr(_libc, "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def make_socket_dir() -> Path:
    """A directory of this process for its sockets to p2pd; short, since a socket's path has 107 bytes."""
    return Path(tempfile.mkdtemp(prefix=f"dilocox-{os.getpid()}-"))


def remove_sockets_of(pid: int) -> None:
    """For a parent: what a child that was killed could not remove itself."""
    for path in Path(tempfile.gettempdir()).glob(f"dilocox-{pid}-*"):
        shutil.rmtree(path, ignore_errors=True)
