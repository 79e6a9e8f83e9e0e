"""A cluster whose disk is full: its state directory is a tmpfs of 20 MB in a mount namespace of its own,
which is gone with the processes in it."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p_dilocox.checkpoint.resume import newest_first
from p2p_dilocox.checkpoint.store import Place
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.swarm.process import die_with_parent
from p2p_dilocox.swarm.signed import spec_digest

from .conftest import LOOPBACK, RUN, Program, serve_text, wait_for_end

Start = Callable[..., Program]
TEXT = RUN.format(outer_steps=100_000, H=12) + "[checkpoint]\nevery = 5\n"


class Disk:
    """A small tmpfs on `directory`. prefix: before a command that is to see it. seen: where we see it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        mount = 'mount -t tmpfs -o size=20m tmpfs "$0" && echo there && exec cat'
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", mount, directory], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        assert self._holder.stdout is not None and self._holder.stderr is not None
        self.why_not = "" if self._holder.stdout.readline() else self._holder.stderr.read().strip()
        self.prefix = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]
        self.seen = Path(f"/proc/{self._holder.pid}/root{directory}")

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.seen / "photos").open("wb", buffering=0) as file:
            for size in (1 << 16, 1):
                while file.write(bytes(size)) == size:
                    pass

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with contextlib.closing(Disk(tmp_path / "small")) as made:
        if made.why_not:
            pytest.skip(f"no mount namespaces here: {made.why_not}")
        yield made


def places(disk: Disk) -> list[Place]:
    """Where training could go on, newest first. Fails if there is a damaged checkpoint."""

    def complain(step: Path, why: str) -> None:
        pytest.fail(f"{step}: {why}")

    return [saved.place for saved in newest_first(disk.seen / "checkpoints", spec_digest(TEXT), complain)]


@pytest.mark.swarm
def test_training_goes_on_while_the_disk_is_full(disk: Disk, start: Start, tmp_path: Path) -> None:
    """R16, field report E2: checkpoints, rounds, history, events, logs, status and curves are all on it."""
    link = serve_text(start, tmp_path, TEXT)
    state = ["--state-dir", tmp_path / "small"]
    options = ["--devices", "cpu:1", "--threads", "1", "--listen", LOOPBACK]
    cluster = start("dilocox-peer", "join", link, *state, *options, prefix=disk.prefix)
    cluster.read_until("outer 10 committed")
    while not list((disk.seen / "checkpoints").glob("step-10*")):
        time.sleep(0.02)
    disk.fill()
    assert "No space left on device" in cluster.read_until("no checkpoint of outer step")
    for _ in range(6):
        cluster.read_until(" committed")
    ask = start("dilocox-peer", "status", "--json", *state, prefix=disk.prefix)
    assert ask.wait() == 0
    status = json.loads(ask.output)
    assert status["failed_checkpoints"] > 0
    cluster.read_until(f"outer {status['committed'] + 1} committed")

    # What was saved before is whole, and once there is room it goes on being saved.
    assert [place.outer_t for place in places(disk)] == [10, 5]
    (disk.seen / "photos").unlink()
    processes = list(cluster.descendants())
    cluster.send(signal.SIGINT)
    assert cluster.wait(timeout_s=20) == 130
    assert wait_for_end(processes, 0) == []
    assert "is not on disk" in cluster.output and "events.jsonl: No space left" in cluster.output
    assert "Traceback" not in cluster.output
    assert not list((disk.seen / "checkpoints").glob(".partial-*"))
    assert places(disk)[0].outer_t > status["committed"]
    assert check_history(read_history([disk.seen / "history" / "rank0.jsonl"])) == []
