"""Clusters that are killed or frozen while they train: real processes, histories checked at the end."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_dilocox.invariants import Line, check_history, read_history

from .conftest import LOOPBACK, RUN, Program, serve_text

Start = Callable[..., Program]


@pytest.fixture
def link(start: Start, tmp_path: Path) -> str:
    text = RUN.format(outer_steps=5000, H=6).replace("round_s = 20.0", "round_s = 8.0")
    text = text.replace("outer_steps", "min_clusters = 3\nouter_steps")
    return serve_text(start, tmp_path, text)


def join(start: Start, link: str, state: Path) -> Program:
    return start(
        "dilocox-peer",
        "join",
        link,
        "--devices",
        "cpu:1",
        "--threads",
        "1",
        "--state-dir",
        state,
        "--listen",
        LOOPBACK,
    )


def history_of(*states: Path) -> list[Line]:
    return read_history(path for state in states for path in sorted((state / "history").glob("*.jsonl")))


def committed(state: Path) -> dict[int, set[int]]:
    """Outer step -> how many clusters were in it."""
    found: dict[int, set[int]] = {}
    for line in history_of(state):
        if line["decision"] == "committed":
            found.setdefault(line["t"], set()).add(len(line["members"]))
    return found


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
            cluster.read_until(" 2 clusters")
    sizes = committed(states[0])
    assert sizes[3] == {3} and sizes[max(sizes)] == {2}
    states += [tmp_path / "wiped", tmp_path / "new"]
    states[3].mkdir(mode=0o700)
    shutil.copy2(states[2] / "cluster.key", states[3])
    clusters[2:] = [join(start, link, state) for state in states[3:]]
    for cluster in clusters:
        cluster.read_until(" 4 clusters")
    leave(clusters)
    assert check_history(history_of(*states)) == []


@pytest.mark.timeout(300)
def test_a_frozen_cluster_is_left_out_and_comes_back_with_the_same_history(
    start: Start, link: str, tmp_path: Path
) -> None:
    """R5: SIGSTOP, sockets open. After SIGCONT it changes no finished round, and is in later ones again."""
    states = [tmp_path / name for name in ("a", "b", "c")]
    clusters = [join(start, link, state) for state in states]
    clusters[2].read_until("outer 3 committed")
    frozen = [*clusters[2].descendants(), clusters[2].process.pid]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    clusters[0].read_until(" 2 clusters")
    clusters[0].read_until(" 2 clusters")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    clusters[0].read_until(" 3 clusters")
    clusters[0].read_until(" 3 clusters")
    leave(clusters)
    assert check_history(history_of(*states)) == []
