"""dilocox-bootstrap as a real process."""

import asyncio
import importlib
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_dilocox.errors import NotTrustedError, StateError
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.node import Node

from .conftest import LOOPBACK, RUN, Program, wait_for_end

addresses = importlib.import_module("p2p_dilocox.bootstrap.addresses")
spec = importlib.import_module("p2p_dilocox.bootstrap.spec")
Start = Callable[..., Program]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(outer_steps=3, H=2))
    return file


UNSTABLE = '[overlap]\nmode = "paper"\n[outer]\nlr = 0.7\nmomentum = 0.9\n'


@pytest.mark.swarm
def test_serve_from_start_to_end(tmp_path: Path, run_file: Path, start: Start) -> None:
    """One long test: every step of it needs the server that the steps before have used."""
    state = tmp_path / "state"
    run_file.write_text(f"{run_file.read_text()}{UNSTABLE}")
    serve = start("dilocox-bootstrap", "serve", "--run", run_file, "--state-dir", state, "--listen", LOOPBACK)
    serve.read_until("warning: outer.lr = 0.7 with momentum 0.9 is above 0.25")
    link_text = serve.read_until("dilocox://")
    serve.read_until("loopback")  # the warning that others cannot use it

    assert (state / "join-link").read_text() == link_text + "\n"
    for key in ("organiser.key", "node.key"):
        assert stat.S_IMODE((state / key).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700

    link = JoinLink.parse(link_text)
    assert fetch(link) == run_file.read_text()

    refused = start("dilocox-peer", "join", link_text, "--devices", "cpu:3", "--state-dir", tmp_path / "peer")
    assert refused.wait() == 2  # two stages
    assert "warning: outer.lr = 0.7 with momentum 0.9 is above 0.25" in refused.output

    second = start(
        "dilocox-bootstrap", "serve", "--run", run_file, "--state-dir", state, "--listen", LOOPBACK
    )
    assert second.wait() == 5
    assert f"in use by process {serve.process.pid}" in second.output

    children = serve.descendants()
    assert any("p2pd" in line[0] for line in children.values())
    serve.send(signal.SIGINT)
    assert serve.wait(timeout_s=10) == 0
    assert wait_for_end(list(children), 0) == []

    again = start("dilocox-bootstrap", "serve", "--run", run_file, "--state-dir", state, "--listen", LOOPBACK)
    later = JoinLink.parse(again.read_until("dilocox://"))
    assert later.organiser == link.organiser
    assert later.peers[0].split("/p2p/")[1] == link.peers[0].split("/p2p/")[1]
    children = again.descendants()
    again.process.kill()
    assert wait_for_end(list(children), 5.0) == []


def fetch(link: JoinLink) -> str:
    async def fetch_text() -> str:
        node = await Node.start(
            run_id=link.run_id, organiser=link.organiser, initial_peers=link.peers, client_mode=True
        )
        try:
            return (await node.fetch_run()).verify(link.organiser)
        finally:
            await node.close()

    return asyncio.run(fetch_text())


@pytest.mark.swarm
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, run_file: Path, start: Start) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "organiser.key").write_bytes(bytes(32))
    (state / "organiser.key").chmod(0o644)
    serve = start("dilocox-bootstrap", "serve", "--run", run_file, "--state-dir", state, "--listen", LOOPBACK)
    assert serve.wait() == NotTrustedError.exit_code
    assert "chmod 600" in serve.output


def test_the_spec_of_a_run_is_fixed_but_its_comments_are_not(tmp_path: Path) -> None:
    text = RUN.format(outer_steps=3, H=2)
    assert spec.fix_spec(tmp_path, text, parse_run(text)) == text
    commented = "# tuned by hand\n" + text
    assert spec.fix_spec(tmp_path, commented, parse_run(commented)) == text
    changed = RUN.format(outer_steps=3, H=9)
    with pytest.raises(StateError, match="inner.H is 2 there and 9 here"):
        spec.fix_spec(tmp_path, changed, parse_run(changed))
    assert (tmp_path / "run.toml").read_text() == text


def test_a_link_prefers_addresses_that_others_can_dial() -> None:
    local, lan = "/ip4/127.0.0.1/tcp/5/p2p/Qm", "/ip4/192.168.1.7/tcp/5/p2p/Qm"
    assert addresses.linkable([local, lan], "Qm", ()) == [lan]
    assert addresses.linkable([local], "Qm", ()) == [local]
    assert addresses.linkable([local, lan], "Qm", ("/dns4/run.example/tcp/80",)) == [
        "/dns4/run.example/tcp/80/p2p/Qm"
    ]


def test_a_link_that_others_cannot_use_comes_with_a_warning() -> None:
    """Field report A11."""
    assert "this machine only" in addresses.reach_warning(["/ip4/127.0.0.1/tcp/5"])
    assert "this network only" in addresses.reach_warning(["/ip4/192.168.1.7/tcp/5"])
    assert addresses.reach_warning(["/ip4/192.168.1.7/tcp/5", "/ip4/8.8.8.8/tcp/5"]) is None
    assert addresses.reach_warning(["/dns4/run.example/tcp/80"]) is None
