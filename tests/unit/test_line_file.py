"""Lines that are whole or absent."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2p_dilocox.line_file import LineFile


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What this process writes stops at `size` bytes per file, amid a write too, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_lines_follow_those_of_an_earlier_start(tmp_path: Path) -> None:
    for line in ("a", "é"):
        file = LineFile(tmp_path / "deep" / "lines")
        file.write(line)
        file.close()
    assert (tmp_path / "deep" / "lines").read_text() == "a\né\n"


def test_a_line_that_does_not_fit_is_absent_and_later_ones_go_on(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.write("first")
    with files_of_at_most(10):
        for _ in range(3):
            with pytest.raises(OSError, match=r"No space left|File too large"):
                file.write("much too long")
    assert (tmp_path / "lines").read_text() == "first\n"
    file.write("later")
    file.close()
    assert (tmp_path / "lines").read_text() == "first\nlater\n"


@pytest.mark.parametrize(
    ("before", "after"), [("a\nb", "a\nc\n"), ("b", "c\n"), ("", "c\n"), ("a\n", "a\nc\n")]
)
def test_half_a_line_of_a_killed_writer_is_dropped(tmp_path: Path, before: str, after: str) -> None:
    (tmp_path / "lines").write_text(before)
    file = LineFile(tmp_path / "lines")
    file.write("c")
    file.close()
    assert (tmp_path / "lines").read_text() == after
