"""A rank that dies or freezes, first or last, in any phase: named, nothing left, and the run goes on. A
cluster that is told to end in any phase, and one whose supervisor is killed."""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_dilocox.averaging.states import steps_in

from .conftest import LOOPBACK, RUN, Program, serve_text, wait_for_end

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
Start = Callable[..., Program]


class Cluster:
    """Of two ranks, the first with the embedding and no layer, alone in a run; checkpoints at every outer
    step, and evaluations that take a while."""

    def __init__(self, start: Start, directory: Path) -> None:
        text = RUN.format(outer_steps=5000, H=4).replace("[eval]\nbatches = 2", "[eval]\nbatches = 60")
        text = text.replace("stages = 2", "stages = 2\ncut = [0, 2]")
        text = text.replace("seq_len = 16", 'seq_len = 16\norder = "shards"')
        self._link = serve_text(start, directory, text + "[checkpoint]\nevery = 1\n")
        self._start, self.state = start, directory / "state"
        self.join()

    def join(self) -> None:
        """From now on only the events of this start are seen."""
        events = self.state / "events.jsonl"
        self._events = self._follow(events, events.stat().st_size if events.exists() else 0)
        self.program = self._start("dilocox-peer", "join", self._link, "--state-dir", self.state,
                                   "--devices", "cpu:2", "--threads", "1", "--listen", LOOPBACK)  # fmt: skip

    def _follow(self, path: Path, offset: int) -> Iterator[dict[str, Any]]:
        rest = ""
        while not path.exists():
            assert self.program.process.poll() is None
            time.sleep(0.01)
        with path.open() as file:
            file.seek(offset)
            while True:
                rest += file.readline()
                if rest.endswith("\n"):
                    yield json.loads(rest)
                    rest = ""
                else:
                    time.sleep(0.002)

    def until(self, **wanted: object) -> dict[str, Any]:
        return next(e for e in self._events if all(e.get(key) == value for key, value in wanted.items()))

    def worker(self, rank: int) -> int:
        name = f"worker-rank{rank}.json"
        found = [
            pid for pid, line in self.program.descendants().items() if any(name in word for word in line)
        ]
        return found[0]

    def reach(self, phase: str, rank: int) -> int:
        """Wait until the rank is in the phase; its process id."""
        if phase == "start-up":
            self.until(kind="phase", rank=rank, name="starting")
        elif phase == "rendezvous":  # the other may wait for it already
            self.until(kind="phase", rank=rank, name="starting", detail="model and data")
        elif phase == "inner step":
            self.until(kind="inner_step", rank=rank)
        elif phase == "round":
            self.until(kind="round_started", rank=rank)
        elif phase == "evaluation":
            self.until(kind="round_committed", rank=rank)
        elif phase == "checkpoint":
            self.until(kind="round_committed", rank=rank)
            pid = self.worker(rank)
            while not list((self.state / "checkpoints").glob(".partial-*")):
                time.sleep(0.0005)
            return pid
        return self.worker(rank)

    def fails(self, phase: str, rank: int, number: signal.Signals = signal.SIGKILL) -> tuple[float, str]:
        """Strike the rank. Seconds until no process of the cluster is left, and what is said of it."""
        pid = self.reach(phase, rank)
        everything = list(self.program.descendants())
        os.kill(pid, number)
        struck = time.monotonic()
        while "starts again" not in (warned := self.until(kind="warned"))["message"]:
            pass
        seconds = time.monotonic() - struck
        assert wait_for_end(everything, 0) == []
        assert not list(self.state.glob("rendezvous-*"))
        assert warned["rank"] == rank, warned
        return seconds, warned["message"]


@pytest.fixture
def cluster(start: Start, tmp_path: Path) -> Cluster:
    return Cluster(start, tmp_path)


def test_a_rank_killed_before_its_group_is_there_and_one_without_memory(cluster: Cluster) -> None:
    _, message = cluster.fails("rendezvous", 0)
    assert message.startswith("ended with signal SIGKILL; the cluster starts again")
    pid = cluster.reach("inner step", 1)
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used, used))
    while "starts again" not in (warned := cluster.until(kind="warned"))["message"]:
        pass
    assert warned["rank"] == 1
    assert warned["message"].startswith("ran out of memory; the cluster starts again")
    cluster.until(kind="round_committed")
    cluster.program.send(signal.SIGINT)
    assert cluster.program.wait(20) == 130


def test_a_frozen_rank_and_one_killed_while_it_saves(cluster: Cluster) -> None:
    """No neighbour would notice the first before gloo's own deadline, minutes later. What the second left is
    no checkpoint: those that are hold all stages (E10)."""
    cluster.until(kind="round_committed", t=2)
    _, message = cluster.fails("inner step", 0, signal.SIGSTOP)
    assert message.startswith("froze: for 15 s it neither spoke nor used its processor, and was killed; the")
    _, message = cluster.fails("checkpoint", 1)
    assert message.startswith("ended with signal SIGKILL")
    cluster.until(kind="shard_trained", t=cluster.until(kind="round_committed")["t"] + 1)
    events = [json.loads(line) for line in (cluster.state / "events.jsonl").read_text().splitlines()]
    assert [e["name"] for e in events if e["kind"] == "phase"].count("resumed") == 2
    # Field report F1: killed twice, each outer step has its shard and no shard comes again.
    shards = {e["t"]: e["shard"] for e in events if e["kind"] == "shard_trained"}
    assert shards == {t: t - 1 for t in range(1, max(shards) + 1)}
    cluster.program.send(signal.SIGINT)
    assert cluster.program.wait(20) == 130
    parts = {f"{part}{number}.safetensors" for part in ("stage", "rank") for number in (0, 1)}
    steps = steps_in(cluster.state / "checkpoints")
    assert steps and all(parts <= {path.name for path in step.iterdir()} for step in steps)


def test_a_signal_in_any_phase_ends_it_and_a_killed_supervisor_leaves_nobody(cluster: Cluster) -> None:
    """R12: SIGINT or SIGTERM. Within 10 s there is no process and no socket, and it can go on from what it
    has saved. While it looks for the run: test_join.py; while it downloads: test_slow_link.py. R13, field
    report H2: kill -9 of the supervisor."""
    for phase, number in (
        ("rendezvous", signal.SIGINT),
        ("inner step", signal.SIGTERM),
        ("round", signal.SIGINT),
        ("checkpoint", signal.SIGTERM),
    ):
        cluster.reach(phase, 0)
        everything = list(cluster.program.descendants())
        cluster.program.send(number)
        assert cluster.program.wait(timeout_s=10) == 128 + number, phase
        assert "leaving" in cluster.program.output
        assert wait_for_end(everything, 0) == []
        assert not (cluster.state / "control.sock").exists()
        assert not list(cluster.state.glob("rendezvous-*"))
        cluster.join()
        if phase != "rendezvous":
            cluster.until(kind="phase", name="resumed")
    cluster.until(kind="round_committed")
    assert "is set aside" not in (cluster.state / "events.jsonl").read_text()
    descendants = cluster.program.descendants()
    assert len([line for line in descendants.values() if "p2pd" in line[0]]) == 2
    cluster.program.process.kill()
    assert wait_for_end(list(descendants), 5.0) == []
