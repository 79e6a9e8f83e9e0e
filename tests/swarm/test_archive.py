"""A run whose clusters have all left goes on from the archive; one that nobody has does not begin anew."""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_dilocox.events import Event, Phase, RoundCommitted, Warned
from p2p_dilocox.invariants import check_history, read_history
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.swarm.identity import ensure_libp2p_identity
from p2p_dilocox.swarm.node import Node

from .conftest import Swarm
from .peer import Peer, run_text
from .test_training import join  # noqa: F401 (join is a fixture)

host = importlib.import_module("p2p_dilocox.bootstrap.host")
MakeSwarm = Callable[[str], Swarm]


class Archives:
    """Archives of one run in one directory, one after the other, each on a node of its own."""

    def __init__(self, net: Swarm, directory: Path) -> None:
        self.net, self.directory, self.warned = net, directory, list[str]()
        self.layouts = host._layouts(parse_run(net.text))
        self.node: Node | None = None

    def start(self) -> Any:
        """The archive, which looks around all the time from now on."""
        self.node = self.net.network.call(self._start_node(), 30)
        made = host.Archive(
            parse_run(self.net.text), self.net.signed, self.net.organiser, self.node, self.layouts,
            self.directory / "archive", 1, self.warned.append,
        )  # fmt: skip
        self.net.network.call(made.open(), 30)
        self.looking = asyncio.run_coroutine_threadsafe(self._look(made), self.net.network.loop)
        return made

    def kill(self) -> None:
        self.looking.cancel()
        if self.node is not None:
            self.net.network.call(self.node.close(), 10)
            self.node = None

    async def _start_node(self) -> Node:
        ensure_libp2p_identity(self.directory / "node.key")
        return await Node.start(
            run_id="test", organiser=self.net.organiser.public, initial_peers=self.net.link[1],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=self.directory / "node.key",
        )  # fmt: skip

    @staticmethod
    async def _look(archive: Any) -> None:
        while True:
            await archive.look()
            await asyncio.sleep(0.3)


@pytest.fixture
def archives(swarm: MakeSwarm, tmp_path: Path) -> Iterator[Archives]:
    made = Archives(swarm(run_text(outer_steps=5000, more="[compression]\nlowrank = 8\n")), tmp_path)
    yield made
    made.kill()


def details(peer: Peer, phase: str) -> list[str]:
    return [e.detail for e in peer.events if isinstance(e, Phase) and e.name == phase]


@pytest.mark.timeout(240)
def test_a_run_goes_on_from_its_archive_and_never_anew(
    archives: Archives,
    join: Callable[[Swarm, str], Peer],  # noqa: F811
    tmp_path: Path,
) -> None:
    """S7; R4 for an archive that is killed."""
    net, archive = archives.net, archives.start()
    first = join(net, "first")
    first.until(lambda e: isinstance(e, RoundCommitted) and e.t == 4)
    first.wish.leave(now=False)
    last = first.finish().t
    assert archive.t == last
    said = [e.message for e in first.events if isinstance(e, Warned)]
    assert (
        f"this was the last cluster; the archive has outer step {last}, and the run can go on from it" in said
    )
    archives.kill()
    archive = archives.start()
    assert archive.t == last and f"outer step {last};" in archive.begins

    def counts(t: int) -> Callable[[Event], bool]:
        return lambda e: isinstance(e, RoundCommitted) and e.included and e.t == t

    second = join(net, "second")
    second.until(counts(last + 1))  # nobody who was in the last round is here
    assert details(second, "catching up") + details(second, "downloading")
    second.wish.leave(now=False)
    end = second.finish().t
    assert archive.t == end
    assert check_history(read_history(p.state / "history" / "rank0.jsonl" for p in (first, second))) == []

    # All that is left of it is the proof that it was committed.
    archives.kill()
    for average in (tmp_path / "archive" / "rounds").glob("*/stage*"):
        average.unlink()
    for state in (tmp_path / "archive").glob("step-*/*"):
        state.unlink()
    archive = archives.start()
    assert f"outer step {end} was committed, but its state is not here" in archive.begins
    third = join(net, "third")
    third.until(lambda e: isinstance(e, Phase) and "nobody is here who has the state" in e.detail)
    assert not details(third, "warming up")
    # The second comes back with it, and both go on.
    second = join(net, "second")
    third.until(lambda e: isinstance(e, RoundCommitted) and e.included and len(e.members) == 2)
    assert details(second, "resumed")[0].startswith(f"resumed outer step {end}, ")
    for peer in (second, third):
        peer.wish.value = peer.wish.LEAVE_NOW
    for peer in (second, third):
        assert peer.finish().reason == "left"


def test_one_that_pauses_is_no_company_for_a_cluster_that_needs_others(
    swarm: MakeSwarm,
    join: Callable[[Swarm, str], Peer],  # noqa: F811
) -> None:
    """With a quorum. Found by benchmarks/chaos.py: it trained on, and its rounds came to nothing."""
    text = run_text(outer_steps=5000, min_clusters=2, more="[compression]\nlowrank = 8\n")
    net = swarm(text.replace("min_clusters = 2", "min_clusters = 2\nquorum = 2"))
    stays, rests = join(net, "stays"), join(net, "rests")
    stays.until(lambda e: isinstance(e, RoundCommitted) and e.t == 4)
    rests.wish.pause("asked to", now=True)
    stays.until(lambda e: isinstance(e, Phase) and e.detail.startswith("1/2 clusters"))
    last = max(e.t for e in stays.events if isinstance(e, RoundCommitted))
    rests.wish.resume()
    stays.until(lambda e: isinstance(e, RoundCommitted) and e.t > last and len(e.members) == 2)
    for peer in (stays, rests):
        peer.wish.value = peer.wish.LEAVE_NOW
    for peer in (stays, rests):
        assert peer.finish().reason == "left"
    assert check_history(read_history(p.state / "history" / "rank0.jsonl" for p in (stays, rests))) == []
