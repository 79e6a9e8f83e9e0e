"""Clusters that are killed, frozen or slowed down while they train: real processes, histories checked at the
end."""

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p_dilocox.invariants import Line, check_history, read_history

from .conftest import LOOPBACK, RUN, Program, serve_text

Start = Callable[..., Program]


@pytest.fixture
def link(start: Start, tmp_path: Path) -> str:
    text = RUN.format(outer_steps=5000, H=6).replace("round_s = 20.0", "round_s = 8.0")
    text = text.replace("lr = 1e-2", "lr = 1e-4")  # so slow that the loss of one alone still falls
    text = text.replace("outer_steps", "min_clusters = 3\nouter_steps")
    return serve_text(start, tmp_path, text)


def join(start: Start, link: str, state: Path, *, devices: str = "cpu:1", fault: str = "") -> Program:
    """fault: see p2p_dilocox/fault_points.py."""
    return start(
        "dilocox-peer", "join", link, "--devices", devices, "--threads", "1", "--state-dir", state,
        "--listen", LOOPBACK, environment={"DILOCOX_FAULT": fault},
    )  # fmt: skip


def history_of(*states: Path) -> list[Line]:
    return read_history(path for state in states for path in sorted((state / "history").glob("*.jsonl")))


def committed(state: Path) -> dict[int, set[int]]:
    """Outer step -> how many clusters were in it."""
    found: dict[int, set[int]] = {}
    for line in history_of(state):
        if line["decision"] == "committed":
            found.setdefault(line["t"], set()).add(len(line["members"]))
    return found


def val_losses(state: Path) -> list[float]:
    """Of every outer step, as this cluster took them."""
    events = map(json.loads, (state / "events.jsonl").read_text().splitlines())
    return [event["val_loss"] for event in events if event["kind"] == "evaluated"]


@contextlib.contextmanager
def at_a_third_of_its_speed(pids: list[int]) -> Iterator[None]:
    """Stopped for two thirds of every third of a second."""
    over = threading.Event()

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def slow() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            time.sleep(0.2)
            send(signal.SIGCONT)
            over.wait(0.1)

    slowing = threading.Thread(target=slow)
    slowing.start()
    try:
        yield
    finally:
        over.set()
        slowing.join()


def leave(clusters: list[Program]) -> None:
    for cluster in clusters:
        cluster.send(signal.SIGINT)
    for cluster in clusters:
        assert cluster.wait(60) == 130, cluster.output


@pytest.mark.timeout(300)
def test_survivors_go_on_as_two_when_a_cluster_is_killed(start: Start, link: str, tmp_path: Path) -> None:
    """R2: kill -9 of a whole cluster. The others' next round is without it, and so are all later ones.

    Field report F3: then it comes back under its key and without its disk, and another one with it.
    """
    states = [tmp_path / name for name in ("a", "b", "c")]
    clusters = [join(start, link, state) for state in states]
    clusters[2].read_until("outer 3 committed")
    for pid in [*clusters[2].descendants(), clusters[2].process.pid]:
        os.kill(pid, signal.SIGKILL)
    for cluster in clusters[:2]:
        for _ in range(3):
            cluster.read_until("committed  2 clusters")
    sizes = committed(states[0])
    assert sizes[3] == {3} and sizes[max(sizes)] == {2}
    states += [tmp_path / "wiped", tmp_path / "new"]
    states[3].mkdir(mode=0o700)
    shutil.copy2(states[2] / "cluster.key", states[3])
    clusters[2:] = [join(start, link, state) for state in states[3:]]
    for cluster in clusters:
        cluster.read_until("committed  4 clusters")
    leave(clusters)
    assert check_history(history_of(*states)) == []


@pytest.mark.timeout(300)
def test_clusters_die_one_after_the_other_the_last_goes_on_alone_and_all_come_back(
    start: Start, link: str, tmp_path: Path
) -> None:
    """R1: a stage of one of three clusters is killed when it has averaged and before it votes; the others
    take that outer step without it, on all stages, and its supervisor brings it back. R2: kill -9 of all of
    it. R3: of the next one, and the last trains on. R4, field report D9: of the last; all three come back,
    and say how long each phase of it took."""
    states = [tmp_path / name for name in ("a", "b", "c")]
    fault = f"kill@averaged:3:{tmp_path / 'once'}"
    clusters = [
        *(join(start, link, state) for state in states[:2]),
        join(start, link, states[2], devices="cpu:2", fault=fault),
    ]
    clusters[2].read_until("starts again from its last checkpoint")
    clusters[0].read_until("committed  2 clusters")
    clusters[0].read_until("committed  3 clusters")
    clusters[2].kill()
    for cluster in clusters[:2]:
        for _ in range(3):
            cluster.read_until("committed  2 clusters")
    clusters[1].kill()
    for _ in range(20):
        clusters[0].read_until("committed  1 cluster ")
    clusters[0].kill()

    sizes, losses, before = committed(states[0]), val_losses(states[0]), [max(committed(s)) for s in states]
    assert (sizes[2], sizes[3], sizes[max(sizes)]) == ({3}, {2}, {1})
    assert sum(losses[-5:]) < sum(losses[-20:-15])
    clusters = [join(start, link, state) for state in states]
    for cluster, t in zip(clusters, before, strict=True):
        resumed = re.search(r"resumed outer step (\d+)", cluster.read_until("resumed outer step"))
        assert resumed is not None and int(resumed[1]) >= t
    for cluster in clusters:
        cluster.read_until("counts since outer step")
        cluster.read_until("committed  3 clusters")
    leave(clusters)
    assert check_history(history_of(*states)) == []


@pytest.mark.timeout(300)
def test_a_frozen_cluster_is_left_out_and_comes_back_with_the_same_history_and_a_slow_one_stops_nobody(
    start: Start, link: str, tmp_path: Path
) -> None:
    """R5: SIGSTOP, sockets open. After SIGCONT it changes no finished round, and is in later ones again. R6:
    at a third of its speed it is waited for or passed over."""
    states = [tmp_path / name for name in ("a", "b", "c")]
    clusters = [join(start, link, state) for state in states]
    clusters[2].read_until("outer 3 committed")
    frozen = [*clusters[2].descendants(), clusters[2].process.pid]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    clusters[0].read_until("committed  2 clusters")
    clusters[0].read_until("committed  2 clusters")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    clusters[0].read_until("committed  3 clusters")
    clusters[0].read_until("committed  3 clusters")
    with at_a_third_of_its_speed(frozen):
        for _ in range(6):
            clusters[0].read_until(" committed")
    clusters[2].read_until("committed  3 clusters")
    leave(clusters)
    assert check_history(history_of(*states)) == []
