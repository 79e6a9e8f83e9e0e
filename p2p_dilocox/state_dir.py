"""The directory in which a program keeps what must outlive it: one running program per directory."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2p_dilocox.errors import StateError

__all__ = ["locked_state_dir", "write_atomic"]


@contextmanager
def locked_state_dir(path: Path) -> Iterator[Path]:
    """Make `path` (mode 0700) if needed and hold its lock; yields the absolute path.

    The kernel drops the lock when the process ends, however it ends. Raises StateError if another process
    holds it or the directory cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = path.resolve()
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StateError(
            f"cannot use the state directory {path}: {error.strerror}. Give one that is writable."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StateError(
                f"the state directory {path} is in use by process {holder}. "
                "End that one first, or give another directory."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield path
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str, mode: int = 0o644) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, never a half.

    Raises StateError if it cannot be written, such as on a full disk.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}. Free space or use another disk.") from error
