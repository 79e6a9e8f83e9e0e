"""A file of lines that grows: JSON lines of events and of history."""

import errno
import os
from pathlib import Path

__all__ = ["LineFile"]

_TAIL_BYTES = 1 << 16


class LineFile:
    """Appends lines to `path`. A line is there whole or not at all, also on a full disk or after a kill.

    Raises OSError: also by `write`, after which later lines may be written again.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - _TAIL_BYTES))
        tail = self._file.read()
        if not tail.endswith(b"\n"):  # its writer was killed, or the machine lost power
            self._file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)

    def write(self, line: str) -> None:
        """line: without its end."""
        content = line.encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(content)
        except OSError:
            self._file.truncate(size)
            raise
        if written != len(content):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self._file.close()
