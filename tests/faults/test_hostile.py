"""Hostile members and strangers: the honest ones take every outer step, stay finite, and say who it was."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hivemind.p2p import P2PHandlerError, PeerID

from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.loop import NetworkThread
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Envelope,
    Message,
    Opening,
    Presence,
    RankAddress,
    Ready,
    StageDone,
    Vote,
    Votes,
    seal,
    unpack,
)  # fmt: skip
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.stream import Frame, Refused, dial

from .crew import Cluster, Crew, Event, members_of, spec_text
from .hostile import CONTRIBUTIONS, REDUCERS

EXACT = "[compression]\nbits = 32\nreturn_bits = 32\nlowrank = 0\ngather_up_to = 0\n"
ROUND_S = 8.0


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four clusters for all tests here; the last is the hostile one."""
    directory = tmp_path_factory.mktemp("hostile")
    with Crew(directory, spec_text(min_clusters=4, round_s=ROUND_S, more=EXACT), side=64) as made:
        made.join(4)
        made.round(1)
        yield made


@pytest.fixture
def hostile(crew: Crew) -> Iterator[Cluster]:
    """Honest and in step when a test begins and ends."""
    cluster = crew.clusters[-1]
    yield cluster
    cluster.lead.tell("become", offence="")
    cluster.lead.wait("became")
    crew.bring_back(cluster, max(c.t for c in crew.clusters) + 1, within=9)
    crew.check(crew.clusters)


def honest_outcomes(crew: Crew, hostile: Cluster, **lies: object) -> list[Event]:
    """Of the next outer step, in which the hostile one does its worst."""
    t = max(c.t for c in crew.clusters) + 1
    for cluster in crew.clusters:
        cluster.start_round(t, **(lies if cluster is hostile else {}))
    outcomes = [c.outcome() for c in crew.clusters if c is not hostile]
    hostile.outcome()
    return outcomes


def expect_without(outcomes: list[Event], crew: Crew, hostile: Cluster) -> None:
    for outcome in outcomes:
        assert members_of(outcome) == sorted(c.id for c in crew.clusters if c is not hostile), outcome
        assert outcome["finite"]
    told = [*(note for o in outcomes for note in o["notes"]), *(c.lead.trace() for c in crew.clusters[:-1])]
    assert any(hostile.id in sentence for sentence in told), told


OFFENCES = [*CONTRIBUTIONS, *REDUCERS, "long frame", "two averages", "silent"]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("offence", OFFENCES)
def test_who_breaks_a_rule_is_left_out_and_named(crew: Crew, hostile: Cluster, offence: str) -> None:
    hostile.lead.tell("become", offence=offence)
    hostile.lead.wait("became")
    expect_without(honest_outcomes(crew, hostile), crew, hostile)


@pytest.mark.timeout(90)
def test_forged_votes_of_others_have_no_effect(crew: Crew, hostile: Cluster) -> None:
    hostile.lead.tell("become", offence="forged vote")
    hostile.lead.wait("became")
    outcomes = honest_outcomes(crew, hostile)
    assert len({tuple(members_of(o)) for o in outcomes}) == 1
    for outcome in outcomes:
        assert {c.id for c in crew.clusters[:-1]} <= set(members_of(outcome)), outcome


@pytest.mark.timeout(90)
@pytest.mark.parametrize("weight", [1e9, -1.0, float("nan")])
def test_a_weight_that_cannot_be_is_refused(crew: Crew, hostile: Cluster, weight: float) -> None:
    for outcome in honest_outcomes(crew, hostile, weight=weight):
        assert members_of(outcome) == sorted(c.id for c in crew.clusters if c is not hostile), outcome
        assert outcome["finite"]


class Garbage(Message, frozen=True, kw_only=True):
    """What a question must not look like."""

    nonsense: bytes = b"\xff" * 1000

    def SerializeToString(self) -> bytes:  # noqa: N802 (hivemind calls it)
        return self.nonsense


class Anything:
    """A reply of any kind."""

    def __init__(self, body: bytes = b"") -> None:
        self.body = body

    @classmethod
    def FromString(cls, data: bytes) -> "Anything":  # noqa: N802
        return cls(data)


class Stranger:
    """A libp2p peer with a key of its own that is in no list of members."""

    def __init__(self, crew: Crew) -> None:
        link = crew.link
        self.run_id, self.key, self.network = "faults", SigningKey.generate(), NetworkThread()
        starting = Node.start(
            run_id=self.run_id, organiser=bytes.fromhex(link["organiser"]), initial_peers=link["peers"],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        )  # fmt: skip
        self.node = self.network.call(starting, 30.0)
        self.gate = Gate(self.key, self.run_id, self.node.peer_id)
        maddrs = self.network.call(self.node.maddrs(), 10.0)
        self.rank = RankAddress(peer=self.node.peer_id, maddrs=maddrs, stages=[0])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.network.call(self.node.close(), 10.0)
        self.network.close()

    def ask(self, peer: str, rpc: str, question: Message) -> None:
        """Raises P2PHandlerError if it is refused; a roll call may refuse in its reply."""
        call = self.node.p2p.call_protobuf_handler(
            PeerID.from_base58(peer), f"{self.run_id}::Service.{rpc}", question, Anything
        )
        reply = self.network.call(call, 20.0)
        if rpc == "rpc_ready" and unpack(reply.body, CallReply).refused:
            raise P2PHandlerError("refused")

    def open(self, peer: str, name: str, first: bytes) -> None:
        """Open a stream; raises Refused or ConnectionError if nothing comes of it."""

        async def talk() -> None:
            stream = await dial(self.node.p2p, peer, f"{self.run_id}::dilocox-{name}", 10.0)
            try:
                await stream.send(Frame.DATA, first, 5.0)
                await stream.receive(1 << 20, 15.0)
            finally:
                stream.close()

        self.network.call(talk(), 30.0)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Crew, Stranger]]:
    """A run whose spec lists its two members, and a stranger who has its link."""
    directory: Path = tmp_path_factory.mktemp("closed")
    ids = [Crew.make_key(directory, number) for number in (1, 2)]
    text = spec_text(min_clusters=2, round_s=ROUND_S, more=EXACT, members=ids)
    with Crew(directory, text, side=64) as crew:
        crew.join(2)
        crew.round(1)
        stranger = Stranger(crew)
        yield crew, stranger
        stranger.close()


def questions(stranger: Stranger, victim: str, lineage: str) -> dict[str, Message]:
    """A well-formed message for every RPC."""
    key, run_id, shown, digest = stranger.key, stranger.run_id, stranger.gate.own, "0" * 64
    presence = Presence(
        cluster_id=key.cluster_id, name="stranger", ranks=[stranger.rank], t=5, h=0, state="training",
        loss=0.0, tokens_per_s=0.0, tokens=0,
    )  # fmt: skip
    ready = Ready(
        spec=digest, cluster_id=key.cluster_id, name="stranger", t=2, attempt=0, lineage=lineage, weight=1.0,
        ranks=[stranger.rank],
    )  # fmt: skip
    ballot = Vote(cluster_id=key.cluster_id, t=2, attempt=0, call=digest, digest="", accused=[victim])
    return {
        "rpc_hello": Envelope(body=seal(key, run_id, presence)),
        "rpc_ready": Envelope(body=seal(key, run_id, ready)),
        "rpc_votes": Votes(t=2, attempt=0, votes=[seal(key, run_id, ballot)], outcome="aborted", shown=shown),
        "rpc_standing": Ask(shown=shown),
        "rpc_result": Ask(t=0, shown=shown),
        "rpc_state": Ask(shown=shown),
        "rpc_call": Ask(t=1),
        "rpc_stage_done": StageDone(t=2, attempt=0, digests={"0": ""}, accused={victim: "is hostile"}),
        "rpc_follow": Ask(t=1),
    }


@pytest.mark.timeout(120)
def test_a_stranger_is_refused_by_every_rpc_and_changes_nothing(closed: tuple[Crew, Stranger]) -> None:
    crew, stranger = closed
    peer, victim = crew.clusters[0].peer, crew.clusters[1].id
    before = crew.clusters[0].digests()
    lineage = crew.clusters[0].lineage
    for rpc, question in questions(stranger, victim, lineage).items():
        for each in (question, Garbage()):
            with pytest.raises(P2PHandlerError):
                stranger.ask(peer, rpc, each)
    opening = Opening(t=2, attempt=0, stage=0, call="0" * 64, shown=stranger.gate.own).pack()
    for name, first in {
        "exchange": opening,
        "average": Ask(t=1, shown=stranger.gate.own).pack(),
        "state": Ask(t=1, shown=stranger.gate.own).pack(),
    }.items():
        for each_first in (first, b"\xff" * 1000, b""):
            with pytest.raises((Refused, ConnectionError)):
                stranger.open(peer, name, each_first)
    assert crew.clusters[0].digests() == before
    for outcome in crew.round(2):
        assert members_of(outcome) == sorted(c.id for c in crew.clusters)
        assert outcome["attempts"] == 1
    crew.check(crew.clusters)
