"""States fetched from several donors at once, over real streams: some lie, die, stop, or have nothing."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_dilocox.averaging.deadlines import Deadline
from p2p_dilocox.averaging.download import Donor, fetch_state
from p2p_dilocox.averaging.states import make_offer, stage_file
from p2p_dilocox.errors import NotTrustedError, UnreachableError
from p2p_dilocox.pieces import digest_file, piece_bytes
from p2p_dilocox.swarm.messages import StateOffer

from ..unit.proofs import averages, committed
from .conftest import Swarm, SwarmCluster, spec_text

MakeSwarm = Callable[[str], Swarm]
SIZE = 6 * (1 << 20) + 12345
LIMITS = {0: 2 * SIZE, 1: 2 * SIZE}


class Exchange:
    """Some donors with the same state of two stages on their disks, and a joiner."""

    def __init__(self, net: Swarm, donors: int, to: Path) -> None:
        self.clusters = [net.join() for _ in range(donors)]
        self.joiner, self.to = net.join(), to
        dice = random.Random(0)
        self.content = {stage: dice.randbytes(SIZE + stage) for stage in (0, 1)}
        for cluster in self.clusters:
            step = self.step(cluster)
            step.mkdir()
            for stage, content in self.content.items():
                (step / stage_file(stage)).write_bytes(content)
        first = self.clusters[0]
        files = {s: digest_file(self.step(first) / stage_file(s)) for s in (0, 1)}
        result = committed([first.key], 1, "a" * 64, averages(1))
        self.offer: StateOffer = make_offer(first.key, "test", "b" * 64, result, files)
        self.donors = [Donor(c.id, [r.address for r in c.ranks]) for c in self.clusters]
        self.seen: list[int] = []

    @staticmethod
    def step(cluster: SwarmCluster) -> Path:
        return Path(cluster.ranks[0].directory.name) / "step-1"

    def fetch(self, limits: dict[int, int] | None = None) -> dict[int, bytes]:
        rank = self.joiner.ranks[0]
        body = fetch_state(
            rank.service, self.offer, self.donors, limits or LIMITS, self.to,
            lambda received, _total: self.seen.append(received),
        )  # fmt: skip
        return {stage: path.read_bytes() for stage, path in rank.network.call(body, 60).items()}


@pytest.fixture
def exchange(swarm: MakeSwarm, tmp_path: Path) -> Callable[[int], Exchange]:
    return lambda donors: Exchange(swarm(spec_text("fedavg")), donors, tmp_path / "incoming")


def test_a_donor_that_lies_is_named_and_the_others_are_enough(exchange: Callable[[int], Exchange]) -> None:
    """S4, field report I12: one flipped bit in one piece; the file that comes out is what members signed."""
    net = exchange(3)
    bad = net.step(net.clusters[0]) / stage_file(1)
    content = bytearray(net.content[1])
    for start in range(0, len(content), piece_bytes(len(content))):
        content[start + 1000] ^= 4
    bad.write_bytes(content)
    assert net.fetch() == net.content
    assert "is not what the members signed" in net.donors[0].trouble
    assert not any(donor.trouble for donor in net.donors[1:])
    assert any(donor.pieces for donor in net.donors[1:])
    assert sum(donor.pieces for donor in net.donors) == 14
    assert net.seen == sorted(net.seen) and net.seen[-1] == sum(map(len, net.content.values()))


def test_a_donor_that_dies_half_way_costs_its_piece_only(exchange: Callable[[int], Exchange]) -> None:
    """S1, field report D1."""
    net = exchange(2)
    rank = net.clusters[0].ranks[0]
    served, piece_of = [0], rank.service._piece_of

    def die(t: int, stage: int, piece: int) -> bytes:
        served[0] += 1
        if served[0] == 3:
            rank.network.loop.call_soon_threadsafe(lambda: asyncio.ensure_future(rank.node.p2p.shutdown()))
        return piece_of(t, stage, piece)

    rank.service._piece_of = die
    assert net.fetch() == net.content
    assert 0 < net.donors[0].pieces < 14 and net.donors[0].trouble
    assert sum(donor.pieces for donor in net.donors) == 14


def test_a_download_goes_on_where_it_was_when_a_donor_is_back(exchange: Callable[[int], Exchange]) -> None:
    """A donor that has half of it: all that it gave is kept, and only the rest is fetched the next time."""
    net = exchange(1)
    (net.step(net.clusters[0]) / stage_file(1)).unlink()
    with pytest.raises(UnreachableError, match=r"6,303,801 of 12,607,603 bytes .* then no donor was left"):
        net.fetch()
    (net.step(net.clusters[0]) / stage_file(1)).write_bytes(net.content[1])
    asked, piece_of = [], net.clusters[0].ranks[0].service._piece_of

    def note(t: int, stage: int, piece: int) -> bytes:
        asked.append((stage, piece))
        return piece_of(t, stage, piece)

    net.clusters[0].ranks[0].service._piece_of = note
    assert net.fetch() == net.content
    assert sorted(asked) == [(1, piece) for piece in range(7)]
    # Damage on our own disk is found too.
    for path in net.to.iterdir():
        with path.open("r+b") as file:
            file.seek(3_000_000)
            file.write(os.urandom(8))
    asked.clear()
    assert net.fetch() == net.content
    assert sorted(asked) == [(0, 2), (1, 2)]


def test_a_donor_that_stands_still_is_worked_around(exchange: Callable[[int], Exchange]) -> None:
    """It takes questions and says nothing: what it was asked for comes from another one."""
    net = exchange(2)
    end = threading.Event()

    def stand_still(_t: int, _stage: int, _piece: int) -> bytes:
        end.wait(60)
        raise NotTrustedError("too late")

    net.clusters[0].ranks[0].service._piece_of = stand_still
    try:
        assert net.fetch() == net.content
    finally:
        end.set()
    assert (net.donors[0].pieces, net.donors[1].pieces) == (0, 14)


class Gone(Exception):  # noqa: N818 (no error: the joiner is killed)
    pass


def test_a_joiner_that_goes_away_five_times_leaves_nothing_behind(
    exchange: Callable[[int], Exchange],
) -> None:
    """S2, field report D4."""
    net = exchange(1)
    service = net.clusters[0].ranks[0].service

    class Fickle(list[int]):
        def append(self, received: int) -> None:
            super().append(received)
            if len(self) > 2:
                raise Gone

    for _ in range(5):
        net.seen = Fickle()
        with pytest.raises(Gone):
            net.fetch()
        for path in net.to.iterdir():
            path.unlink()
    deadline = Deadline(30)
    while service._streams and not deadline.passed:
        net.joiner.ranks[0].network.call(asyncio.sleep(0.1), 5)
    assert not service._streams and service._reads._value == 8
    net.seen = []
    assert net.fetch() == net.content


def test_more_than_is_due_is_refused_before_anything_is_fetched(exchange: Callable[[int], Exchange]) -> None:
    net = exchange(1)
    with pytest.raises(NotTrustedError, match="at most 1000 are due"):
        net.fetch({0: 1000, 1: SIZE})
    assert not net.to.exists()
