"""A cluster whose ranks fail: when it starts again, and when it does not."""

import importlib
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from p2p_dilocox import errors

from .conftest import LOOPBACK, RUN, Program, serve_text, wait_for_end

restarts = importlib.import_module("p2p_dilocox.peers.restarts")
Start = Callable[..., Program]


def test_pauses_double_and_after_five_restarts_in_ten_minutes_there_is_none() -> None:
    count = restarts.Restarts()
    assert [count.pause_s(float(now)) for now in range(6)] == [1, 2, 4, 8, 16, None]
    assert count.pause_s(599.0) is None
    assert count.pause_s(600.0) == 16  # the first one is forgotten
    assert count.pause_s(10_000.0) == 1


def test_what_another_start_would_only_show_again_is_hopeless() -> None:
    hopeful = {errors.DilocoxError, errors.UnreachableError, errors.ClusterError, errors.DriftedError}
    hopeful |= {errors.LostError, errors.OutOfMemoryError}  # another program may have had the memory
    kinds = {getattr(errors, name) for name in errors.__all__}
    assert set(restarts.HOPELESS) == {kind.exit_code for kind in kinds - hopeful}
    assert not set(restarts.HOPELESS) & {kind.exit_code for kind in hopeful}


@pytest.fixture
def serve(tmp_path: Path, start: Start) -> Callable[[str], str]:
    """Serves a run.toml; the join link."""
    return partial(serve_text, start, tmp_path)


def join(start: Start, link: str, state: Path) -> Program:
    options = ["--devices", "cpu:2", "--threads", "1", "--listen", LOOPBACK, "--name", "ridge-3"]
    return start("dilocox-peer", "join", link, "--state-dir", state, *options)


def worker(cluster: Program, rank: int) -> int:
    """Its process id."""
    (pid,) = (
        pid
        for pid, line in cluster.descendants().items()
        if any(f"worker-rank{rank}.json" in argument for argument in line)
    )
    return pid


@pytest.mark.swarm
@pytest.mark.timeout(180)
def test_a_killed_rank_costs_a_restart_and_the_run_is_completed(
    tmp_path: Path, start: Start, serve: Callable[[str], str]
) -> None:
    """Rank 1 has the norm, its copy of the tied embedding, and no layer."""
    text = RUN.format(outer_steps=40, H=4).replace("stages = 2", "stages = 2\ncut = [2, 0]")
    link = serve(text + "[checkpoint]\nevery = 1\n")
    cluster = join(start, link, tmp_path / "state")
    cluster.read_until("outer 2 committed")
    first = list(cluster.descendants())
    os.kill(worker(cluster, 1), signal.SIGKILL)
    cluster.read_until("rank 1: ended with signal SIGKILL; the cluster starts again from its last checkpoint")
    cluster.read_until("committed")
    assert wait_for_end(first, 0) == []
    assert cluster.wait(timeout_s=120) == 0
    assert "complete at outer step 40" in cluster.output
    assert cluster.output.count("outer 1 committed") == 1  # it went on from a checkpoint
    lines = (tmp_path / "state" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["name"] for e in events if e["kind"] == "phase"].count("restarting") == 1
    assert any("SIGKILL" in e["message"] for e in events if e["kind"] == "warned")
    assert json.loads((tmp_path / "state" / "status.json").read_text())["phase"] == "complete"


@pytest.mark.swarm
def test_ctrl_c_between_two_starts_ends_at_once(endless_run: str, tmp_path: Path, start: Start) -> None:
    cluster = join(start, endless_run, tmp_path / "state")
    cluster.read_until("starting")
    os.kill(worker(cluster, 0), signal.SIGKILL)
    cluster.read_until("restarting: in 1 s")
    assert cluster.descendants() == {}
    cluster.send(signal.SIGINT)
    assert cluster.wait(timeout_s=10) == 130
    assert cluster.output.count("loading libraries") == 1


@pytest.mark.swarm
def test_a_rank_without_its_data_ends_the_cluster_with_its_own_error(
    tmp_path: Path, start: Start, serve: Callable[[str], str]
) -> None:
    """Field report F8; tests/unit/test_text.py has all that may be wrong with a text."""
    (tmp_path / "words.txt").write_text("too few words")
    data = f'[data]\nsource = "text"\npaths = ["{tmp_path / "words.txt"}"]'
    cluster = join(start, serve(RUN.format(outer_steps=9, H=2).replace("[data]", data)), tmp_path / "state")
    assert cluster.wait() == errors.DataError.exit_code
    assert "error: rank 0: the training text has " in cluster.output
    assert "starts again" not in cluster.output
