"""A run that outlives its bootstrap node: real processes. tests/swarm/test_archive.py: its clusters."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p_dilocox.invariants import check_history, read_history

from .conftest import LOOPBACK, RUN, Program

pytestmark = pytest.mark.swarm
Start = Callable[..., Program]


def peer(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("dilocox-peer"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


class Life:
    """The organiser's node on a port of its own, and clusters."""

    def __init__(self, start: Start, directory: Path) -> None:
        self.start, self.directory = start, directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (directory / "run.toml").write_text(
            RUN.format(outer_steps=100_000, H=40) + "[checkpoint]\nevery = 3\n"
        )
        self.boot, self.link = self.serve()

    def serve(self) -> tuple[Program, str]:
        boot = self.start(
            "dilocox-bootstrap", "serve", "--run", self.directory / "run.toml",
            "--state-dir", self.directory / "boot", "--listen", f"/ip4/127.0.0.1/tcp/{self.port}",
            "--archive", "0",
        )  # fmt: skip
        return boot, boot.read_until("dilocox://")

    def join(self, name: str, link: str = "") -> Program:
        return self.start(
            "dilocox-peer", "join", link or self.link, "--state-dir", self.directory / name, "--name", name,
            "--devices", "cpu:1", "--threads", "1", "--listen", LOOPBACK,
        )  # fmt: skip

    def committed(self, name: str) -> int:
        return int(
            json.loads(peer("status", "--json", "--state-dir", self.directory / name).stdout)["committed"]
        )

    def check(self, *names: str) -> None:
        files = [f for n in names for f in sorted((self.directory / n / "history").glob("*.jsonl"))]
        assert check_history(read_history(files)) == []


@pytest.fixture
def life(start: Start, tmp_path: Path) -> Iterator[Life]:
    programs: list[Program] = []

    def start_one(*arguments: str | Path) -> Program:
        programs.append(start(*arguments))
        return programs[-1]

    yield Life(start_one, tmp_path)
    for program in programs:  # shown if the test has failed
        sys.stdout.write(f"{program.process.args!r}\n{program.output[-3000:]}\n")


@pytest.mark.timeout(240)
def test_others_join_and_nobody_misses_a_step_while_the_bootstrap_node_is_gone(life: Life) -> None:
    """R9, field report A5."""
    first = life.join("first")
    first.read_until("outer 2 committed")
    # The bootstrap node dies; nobody misses an outer step, and others come in by way of the cluster.
    life.boot.process.kill()
    life.boot.wait()
    at = life.committed("first")
    link = peer("link", "--state-dir", life.directory / "first").stdout.strip()
    second = life.join("second", link)
    second.read_until("connection refused")  # the dead address is named
    second.read_until("committed  2 clusters")
    first.read_until("committed  2 clusters")
    assert "dropped" not in first.output
    assert life.committed("first") > at
    # It comes back with its old key, and finds them.
    life.boot, again = life.serve()
    assert again.split("?")[1] == life.link.split("?")[1]
    life.boot.read_until("2 present")
    for program in (second, first):
        program.send(signal.SIGINT)
    for program in (second, first):
        assert program.wait() == 130
    life.check("first", "second")
