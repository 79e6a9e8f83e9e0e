"""A cluster that joins over a link so slow that others take outer steps meanwhile: hosts in network
namespaces, see p2p_dilocox/shaped_links.py."""

import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_dilocox.invariants import Line, check_history, read_history
from p2p_dilocox.shaped_links import Links, why_not

from .conftest import RUN, Program, wait_for_end

REASON = why_not()
pytestmark = [pytest.mark.swarm, pytest.mark.skipif(bool(REASON), reason=REASON)]
Start = Callable[..., Program]
KILLS = int(os.environ.get("SLOW_LINK_KILLS", "0"))  # S2 has five; each takes some seconds
RATE, SLOW_RATE = "8mbit", "1.5mbit"  # of the joiner; for three outer steps of its download it is slow
EVERY = 5
TEXT = (
    RUN.format(outer_steps=100_000, H=120)
    .replace("hidden_size = 32\nintermediate_size = 64", "hidden_size = 128\nintermediate_size = 256")
    .replace("outer_steps", "min_clusters = 2\nouter_steps")
    + f"[checkpoint]\nevery = {EVERY}\nkeep = 4\n"
)


@pytest.fixture
def links() -> Iterator[Links]:
    with Links(4, "200mbit") as made:
        yield made


class Host:
    """A cluster on a host of its own, by the link as it is printed and no option about addresses."""

    def __init__(self, start: Start, links: Links, number: int, state: Path, link: str) -> None:
        self._start, self._prefix, self._link, self.state = start, links.prefix(number), link, state
        self.join()

    def join(self) -> None:
        self._from = len(self.events()) if self.state.exists() else 0
        self.program = self._start(
            "dilocox-peer", "join", self._link, "--state-dir", self.state, "--devices", "cpu:1",
            "--threads", "1", prefix=self._prefix,
        )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        path = self.state / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def downloads(self, percent: int) -> None:
        """Wait until this start has so much of a state."""
        while not any(
            event["kind"] == "phase"
            and event["name"] == "downloading"
            and int(event["detail"].split("%")[0]) >= percent
            for event in self.events()[self._from :]
        ):
            assert self.program.process.poll() is None, self.program.wait() or self.program.output
            time.sleep(0.02)

    def history(self) -> list[Line]:
        return read_history([self.state / "history" / "rank0.jsonl"])

    def digests(self) -> dict[int, dict[str, str]]:
        """Of its parameters after the outer steps that it was in."""
        committed = [e for e in self.events() if e["kind"] == "round_committed" and e["included"]]
        return {e["t"]: e["parameter_digests"] for e in committed}


@pytest.mark.timeout(300)
def test_a_cluster_behind_a_slow_link_comes_in_though_it_is_interrupted_and_a_donor_dies(
    start: Start, links: Links, tmp_path: Path
) -> None:
    """S3, field report D2: the download takes more than three outer steps, and it is in the swarm three after
    its end at the latest, with two downloads at most. A11: the link that a bootstrap node prints by default
    works on other hosts. R12, S2, D4: Ctrl-C and kill -9 of the joiner in the middle of its download cost the
    donors nothing. S1, D1: kill -9 of a donor, too. D6: after its first round its parameters are those of the
    other."""
    (tmp_path / "run.toml").write_text(TEXT)
    serve = ["serve", "--run", tmp_path / "run.toml", "--state-dir", tmp_path / "organiser", "--archive", "0"]
    link = start("dilocox-bootstrap", *serve, prefix=links.prefix(0)).read_until("dilocox://")
    assert f"/ip4/{links.address(0)}/tcp/31337/p2p/" in link
    first, second = (Host(start, links, n, tmp_path / str(n), link) for n in (1, 2))
    for donor in (first, second):
        donor.program.read_until("committed  2 clusters")
        donor.program.read_until(f"outer {EVERY + 1} committed")
        while not list((donor.state / "checkpoints").glob(f"step-{EVERY}*")):
            time.sleep(0.02)
        for t in range(1, EVERY + 1):  # else it would fetch these small rounds, and no state
            shutil.rmtree(donor.state / "rounds" / str(t))
    links.set_rate(3, RATE)
    joiner = Host(start, links, 3, tmp_path / "3", link)
    for number in (signal.SIGINT, *itertools.repeat(signal.SIGKILL, KILLS)):
        joiner.downloads(percent=20)
        everything = list(joiner.program.descendants())
        if number == signal.SIGINT:
            joiner.program.send(number)
            assert joiner.program.wait(timeout_s=10) == 130
            assert not (joiner.state / "control.sock").exists()
        else:
            joiner.program.kill()
        assert wait_for_end(everything, 5.0) == []
        joiner.join()
    joiner.downloads(percent=0)
    links.set_rate(3, SLOW_RATE)
    before = len(first.history())
    while len(first.history()) < before + 3:
        time.sleep(0.02)
    assert not any(e["kind"] == "phase" and e["name"] == "verifying" for e in joiner.events())
    assert {(line["decision"], line["attempts"]) for line in first.history()} == {("committed", 1)}
    first.program.kill()
    links.set_rate(3, RATE)
    joiner.program.read_until("counts since outer step")
    for cluster in (joiner, second):
        cluster.program.read_until("committed  2 clusters")

    for cluster in (joiner, second):
        cluster.program.send(signal.SIGINT)
    for cluster in (joiner, second):
        assert cluster.program.wait() == 130
    verified = [e["time"] for e in joiner.events() if e["kind"] == "phase" and e["name"] == "verifying"]
    assert 1 <= len(verified) <= 2
    then = max(line["t"] for line in second.history() if line["time"] <= verified[-1])
    mine, theirs = joiner.digests(), second.digests()
    assert min(mine) <= then + 3
    shared = mine.keys() & theirs.keys()
    assert shared and all(mine[t] == theirs[t] for t in shared)
    assert check_history(first.history() + second.history() + joiner.history()) == []
