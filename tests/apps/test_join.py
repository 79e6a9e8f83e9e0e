"""dilocox-peer join as real processes: what the supervisor promises about its ranks."""

import asyncio
import json
import math
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.messages import Presence, RankAddress
from p2p_dilocox.swarm.node import Node

from .conftest import LOOPBACK, RUN, Program, wait_for_end

pytestmark = pytest.mark.swarm
Start = Callable[..., Program]


def join(start: Start, link: str, state: Path, *, devices: str = "cpu:2") -> Program:
    """A cluster that has committed an outer step."""
    options = ["--devices", devices, "--threads", "1", "--listen", LOOPBACK, "--name", "ridge-3"]
    cluster = start("dilocox-peer", "join", link, "--state-dir", state, *options)
    cluster.read_until(" committed")
    return cluster


def peer(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("dilocox-peer"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_cluster_shows_its_status_and_leaves_when_asked(
    endless_run: str, tmp_path: Path, start: Start
) -> None:
    state = tmp_path / ("deep" * 30) / "state"  # longer than a unix socket's path may be
    cluster = join(start, endless_run, state)
    pids = list(cluster.descendants())
    assert len([line for line in cluster.descendants().values() if "p2p_dilocox.peers.worker" in line]) == 2

    status = json.loads(peer("status", "--json", "--state-dir", state).stdout)
    assert status["running"] is True
    assert status["pid"] == cluster.process.pid
    assert status["members"] == [status["cluster_id"]]
    assert status["committed"] >= 1
    assert "ridge-3" in peer("status", "--state-dir", state).stdout
    (present,) = json.loads(peer("status", "--json", endless_run).stdout)
    assert (present["cluster_id"], present["name"]) == (status["cluster_id"], "ridge-3")

    again = peer("join", endless_run, "--state-dir", state)
    assert again.returncode == 5
    assert f"in use by process {cluster.process.pid}" in again.stderr
    for private in ("cluster.key", "control.sock", "worker-rank0.json", "rank0.key"):
        assert stat.S_IMODE((state / private).stat().st_mode) == 0o600, private

    left = peer("leave", "--state-dir", state)
    assert (left.returncode, left.stdout) == (0, "left\n"), left.stderr
    assert cluster.wait() == 0
    assert wait_for_end(pids, 0) == []
    assert not (state / "control.sock").exists()
    assert json.loads(peer("status", "--json", "--state-dir", state).stdout)["running"] is False
    assert peer("export", state, tmp_path / "model").returncode == 0
    assert (tmp_path / "model" / "config.json").exists()


def test_a_second_ctrl_c_kills_a_rank_that_does_not_hear(
    endless_run: str, tmp_path: Path, start: Start
) -> None:
    cluster = join(start, endless_run, tmp_path / "state", devices="cpu:1")
    descendants = cluster.descendants()
    (worker,) = (pid for pid, line in descendants.items() if "p2p_dilocox.peers.worker" in line)
    os.kill(worker, signal.SIGSTOP)
    cluster.send(signal.SIGINT)
    cluster.read_until("once more to kill")
    cluster.send(signal.SIGINT)
    assert cluster.wait(timeout_s=5) == 130
    assert wait_for_end(list(descendants), 0) == []


def test_a_state_directory_of_another_spec_is_refused_with_what_differs(
    endless_run: str, tmp_path: Path
) -> None:
    """S5, field report B12."""
    text = RUN.format(outer_steps=1_000_000, H=2).replace("hidden_size = 32", "hidden_size = 64")
    text = text.replace("lowrank = 4", "lowrank = 8\nbits = 8\ngroup = 32")
    (tmp_path / "run.toml").write_text(text)
    refused = peer("join", endless_run, "--state-dir", tmp_path)
    assert refused.returncode == 5
    for key, there, here in (
        ("model.config.hidden_size", 64, 32),
        ("compression.lowrank", 8, 4),
        ("compression.bits", 8, 4),
        ("compression.group", 32, 64),
    ):
        assert f"{key} is {there} there and {here} here" in refused.stderr
    assert (tmp_path / "run.toml").read_text() == text


def test_wrong_devices_are_refused_once_the_spec_is_known(endless_run: str, tmp_path: Path) -> None:
    refused = peer("join", endless_run, "--devices", "cpu:3", "--state-dir", tmp_path / "state")
    assert refused.returncode == 2
    assert "this run has 2 stages" in refused.stderr


def test_a_model_that_cannot_be_cut_is_refused_before_the_cluster_takes_part(
    tmp_path: Path, start: Start
) -> None:
    head, _, rest = RUN.format(outer_steps=9, H=2).partition("[model.config]")
    mamba = (
        "[model.config]\nmodel_type = 'mamba'\nhidden_size = 32\nnum_hidden_layers = 2\nvocab_size = 2048\n"
    )
    (tmp_path / "run.toml").write_text(head + mamba + rest[rest.index("[data]") :])
    link = start(
        "dilocox-bootstrap", "serve", "--run", tmp_path / "run.toml", "--state-dir", tmp_path / "organiser",
        "--listen", LOOPBACK,
    ).read_until("dilocox://")  # fmt: skip
    refused = peer("join", link, "--devices", "cpu:1", "--state-dir", tmp_path / "state")
    assert refused.returncode == 6 and "mamba keeps a recurrent state" in refused.stderr
    assert json.loads(peer("status", "--json", link).stdout) == []


def test_a_bootstrap_node_that_is_gone_is_named(endless_run: str, tmp_path: Path) -> None:
    port = endless_run.split("/tcp/")[1].split("/")[0]
    gone = endless_run.replace(f"/tcp/{port}/", "/tcp/9/")
    refused = peer("join", gone, "--state-dir", tmp_path / "state")
    assert refused.returncode == 3
    assert "connection refused" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_port_of_another_program_is_refused_and_its_owner_named(endless_run: str, tmp_path: Path) -> None:
    """Field report G7; test_node.py has the one that is taken in the last moment."""
    port = endless_run.split("/tcp/")[1].split("/")[0]
    listen = f"/ip4/127.0.0.1/tcp/{port}"
    refused = peer("join", endless_run, "--state-dir", tmp_path / "state", "--listen", listen)
    assert refused.returncode == 2
    assert re.search(rf"{listen}: port {port} is in use by process \d+ \(p2pd\)", refused.stderr)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(10, "s ahead of the swarm's"), (-10, "s behind the swarm's")]
)
def test_a_machine_whose_clock_is_off_is_told_by_how_much(
    endless_run: str, tmp_path: Path, ahead_s: int, words: str
) -> None:
    """S10, field report A2."""
    arguments = ["join", endless_run, "--state-dir", str(tmp_path / "state")]
    program = (
        f"import time; real = time.time; time.time = lambda: real() + {ahead_s}\n"
        f"from p2p_dilocox.peers.cli import main; main({arguments!r})"
    )
    refused = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 3, refused.stderr
    assert words in refused.stderr and "NTP" in refused.stderr
    assert re.search(r"clock is (10\.\d|9\.[5-9]) s", refused.stderr), refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_while_the_bootstrap_node_gives_no_answer(
    endless_run: str, tmp_path: Path, start: Start, number: signal.Signals, status: int
) -> None:
    """R12."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = endless_run.split("/tcp/")[1].split("/")[0]
        link = endless_run.replace(f"/tcp/{port}/", f"/tcp/{silent.getsockname()[1]}/")
        cluster = start("dilocox-peer", "join", link, "--state-dir", tmp_path / "state")
        dialling, _ = silent.accept()
        with dialling:
            descendants = cluster.descendants()
            cluster.send(number)
            assert cluster.wait(timeout_s=10) == status
    assert "Traceback" not in cluster.output
    assert wait_for_end(list(descendants), 0) == []


def test_a_cluster_behind_nat_averages_with_one_that_can_be_dialled(
    endless_run: str, tmp_path: Path, start: Start
) -> None:
    dialled = join(start, endless_run, tmp_path / "dialled", devices="cpu:1")
    options = ["--client", "--devices", "cpu:2", "--threads", "1"]
    hidden = start("dilocox-peer", "join", endless_run, "--state-dir", tmp_path / "hidden", *options)
    hidden.read_until("committed  2 clusters")
    clusters = json.loads(peer("status", "--json", endless_run).stdout)
    assert len(clusters) == 2
    for program in (hidden, dialled):
        program.send(signal.SIGINT)
    for program in (hidden, dialled):
        assert program.wait() == 130
    assert peer("check-history", tmp_path / "dialled", tmp_path / "hidden").returncode == 0
    refused = peer("join", endless_run, "--client", "--listen", LOOPBACK, "--state-dir", tmp_path / "no")
    assert refused.returncode == 2
    assert "Leave out --listen" in refused.stderr


def test_of_two_machines_with_one_identity_the_second_has_to_go(
    endless_run: str, tmp_path: Path, start: Start
) -> None:
    """S8, field report I3."""
    first = join(start, endless_run, tmp_path / "first", devices="cpu:1")
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    shutil.copy2(tmp_path / "first" / "cluster.key", copy)
    status = json.loads(peer("status", "--json", "--state-dir", tmp_path / "first").stdout)
    assert peer("id", "--state-dir", copy).stdout.strip() == status["cluster_id"]
    second = start(
        "dilocox-peer", "join", endless_run, "--state-dir", copy, "--devices", "cpu:1", "--threads", "1"
    )
    assert second.wait(timeout_s=60) == 4
    assert "is in this run already" in second.output and "--state-dir" in second.output
    before = json.loads(peer("status", "--json", "--state-dir", tmp_path / "first").stdout)["committed"]
    first.read_until(f"outer {before + 2} committed")
    first.send(signal.SIGINT)
    assert first.wait() == 130


def test_the_status_of_a_run_is_json_whatever_a_cluster_says(endless_run: str) -> None:
    link, key = JoinLink.parse(endless_run), SigningKey.generate()
    rank = RankAddress(peer=link.peers[0].split("/p2p/")[1], maddrs=[], stages=[0, 1])
    presence = Presence(
        cluster_id=key.cluster_id, name="nan", ranks=[rank], t=0, h=1, state="training", loss=math.nan,
        tokens_per_s=0.0, tokens=0,
    )  # fmt: skip

    async def publish_and_ask() -> str:
        node = await Node.start(run_id=link.run_id, organiser=link.organiser, initial_peers=link.peers)
        try:
            assert await node.publish_presence(key, presence)
            return (await asyncio.to_thread(peer, "status", "--json", endless_run)).stdout
        finally:
            await node.close()

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    clusters = json.loads(asyncio.run(publish_and_ask()), parse_constant=refuse)
    assert [c["loss"] for c in clusters if c["name"] == "nan"] == [None]
