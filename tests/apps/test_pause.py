"""A cluster that pauses, comes back and leaves while another trains: real processes."""

import datetime
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_dilocox.invariants import check_history, read_history

from .conftest import LOOPBACK, RUN, Program, serve_text, wait_for_end

pytestmark = pytest.mark.swarm
Start = Callable[..., Program]
H = 6


@pytest.fixture
def link(start: Start, tmp_path: Path) -> str:
    """Of a run whose rounds may take so long that a test in which one waits for another fails."""
    text = RUN.format(outer_steps=100_000, H=H).replace("round_s = 20.0", "round_s = 900.0")
    return serve_text(start, tmp_path, text)


def join(start: Start, link: str, state: Path, devices: str, *more: str) -> Program:
    options = ["--devices", devices, "--threads", "1", "--listen", LOOPBACK, *more]
    return start("dilocox-peer", "join", link, "--state-dir", state, *options)


def peer(*arguments: str | Path) -> str:
    program = Path(sys.executable).with_name("dilocox-peer")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def status(state: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads(peer("status", "--json", "--state-dir", state))
    return record


def test_outside_its_hours_a_cluster_rests_and_can_be_told_to_leave(
    link: str, start: Start, tmp_path: Path
) -> None:
    hour = (datetime.datetime.now().hour + 6) % 24
    hours = f"{hour:02}:00-{hour:02}:30"
    cluster = join(start, link, tmp_path / "state", "cpu:2", "--hours", hours)
    cluster.read_until(f"paused: outside {hours}")
    assert peer("leave", "--state-dir", tmp_path / "state") == "left\n"
    assert cluster.wait() == 0
    assert "inner_step" not in (tmp_path / "state" / "events.jsonl").read_text()


@pytest.mark.timeout(240)
def test_nobody_waits_for_a_cluster_that_pauses_or_leaves(link: str, start: Start, tmp_path: Path) -> None:
    """R11, B8: what it has trained is delivered first, and the others' next round goes on without it."""
    stays, goes = tmp_path / "stays", tmp_path / "goes"
    first = join(start, link, stays, "cpu:1")
    first.read_until("outer 1 committed")
    second = join(start, link, goes, "cpu:2", "--upload-rate", "2MB", "--month-bytes", "50GB")
    first.read_until("committed  2 clusters")
    pids = list(second.descendants())

    assert peer("pause", "--state-dir", goes) == "pauses after this outer step\n"
    second.read_until("paused: asked to")
    first.read_until("committed  1 cluster ")
    assert [status(goes)[key] for key in ("phase", "detail", "paused")] == ["paused", "asked to", "asked to"]
    assert int(str(status(goes)["month_bytes"])) > int(str(status(goes)["sent_bytes"])) > 0
    states = {c["cluster_id"]: c["state"] for c in json.loads(peer("status", "--json", link))}
    assert states == {status(stays)["cluster_id"]: "training", status(goes)["cluster_id"]: "paused"}

    assert peer("resume", "--state-dir", goes) == "resumes\n"
    first.read_until("committed  2 clusters")
    assert list(second.descendants()) == pids  # the same processes
    second.read_until("committed  2 clusters")

    assert peer("leave", "--state-dir", goes) == "left\n"
    assert second.wait() == 0
    assert wait_for_end(pids, 0) == []
    first.read_until("committed  1 cluster ")
    first.send(signal.SIGINT)
    assert first.wait() == 130

    files = {path: read_history([path / "history" / "rank0.jsonl"]) for path in (stays, goes)}
    assert check_history([line for lines in files.values() for line in lines]) == []
    assert {line["attempts"] for line in files[stays]} == {1}
    last = files[goes][-1]
    assert (last["decision"], len(last["members"])) == ("committed", 2)
    events = [json.loads(line) for line in (goes / "events.jsonl").read_text().splitlines()]
    trained = [(e["t"], e["h"]) for e in events if e["kind"] == "inner_step"]
    assert trained[-1] == (last["t"], H)  # nothing that was not delivered
    resting = next(i for i, e in enumerate(events) if e["kind"] == "phase" and e["name"] == "paused")
    before = [(e["t"], e["h"]) for e in events[:resting] if e["kind"] == "inner_step"]
    assert before[-1][1] == H
    assert next(e["kind"] for e in events[resting:] if e["kind"] == "phase" and e["name"] != "paused")
