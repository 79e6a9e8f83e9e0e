"""Every record and message that crosses the wire: msgpack with a fixed schema, checked when it is decoded.

A message that speaks for a cluster travels in a `Sealed` envelope signed by the cluster's key. The signature
covers
the kind of message and the run, so a record of one kind or run cannot be replayed as another.
"""

from typing import Annotated, Literal, Self, TypeVar

import msgspec

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.pieces import FileDigest
from p2p_dilocox.swarm.identity import SigningKey, cluster_id_of, is_signed_by

__all__ = [
    "PROTOCOL", "Ask", "Call", "CallReply", "DataClaim", "Decision", "Envelope", "Follow", "Message",
    "Opening", "Pass", "Presence", "RankAddress", "Ready", "Result", "StageDone", "Standing", "StateClaim",
    "StateOffer", "Vote", "Votes",
    "open_sealed", "peer_of_stage", "seal", "unpack",
]  # fmt: skip

PROTOCOL = 5  # raised when two versions could not average together

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Measure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
ClusterId = Annotated[str, msgspec.Meta(pattern=r"^[a-z2-7]{16}\Z")]
PartDigest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
PartDigests = Annotated[list[PartDigest], msgspec.Meta(max_length=256)]
PeerName = Annotated[str, msgspec.Meta(pattern=r"^[1-9A-HJ-NP-Za-km-z]{20,80}\Z")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Stage = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9][0-9]{0,3})\Z")]  # its number, as a key
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}\Z")]
Outcome = Literal["open", "committed", "aborted"]
Maddr = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^/[!-~]*\Z")]
Reason = Annotated[str, msgspec.Meta(max_length=500)]
SealedBytes = Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages."""

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    SerializeToString = pack  # what hivemind calls on the messages of its RPCs

    @classmethod
    def FromString(cls, data: bytes) -> Self:  # noqa: N802
        return unpack(data, cls)


class RankAddress(Message, frozen=True, kw_only=True):
    """A rank of a cluster: its libp2p peer, where to dial it, and the stages it holds."""

    peer: PeerName
    maddrs: Annotated[list[Maddr], msgspec.Meta(max_length=16)]
    stages: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, lt=4096)]], msgspec.Meta(min_length=1, max_length=4096)
    ]


Ranks = Annotated[list[RankAddress], msgspec.Meta(min_length=1, max_length=512)]


def peer_of_stage(ranks: list[RankAddress], stage: int) -> str | None:
    """The libp2p peer that holds a stage of a cluster; None if none of its ranks says so."""
    return next((rank.peer for rank in ranks if stage in rank.stages), None)


class DataClaim(Message, frozen=True, kw_only=True):
    """What a cluster knows to be trained of the data, and what it holds: see data/leases.py."""

    done: Count = 0
    ahead: Annotated[bytes, msgspec.Meta(max_length=128)] = b""
    held: Annotated[list[Count], msgspec.Meta(max_length=8)] = []


class Presence(Message, frozen=True, kw_only=True):
    """A cluster's heartbeat. `t`: last outer step it took; `h`: inner steps since. `state`: joining,
    training, paused, left; archive: it trains nothing, it keeps states.

    `since`: Unix time at which it came; of two machines with one identity the later one has to go.
    """

    cluster_id: ClusterId
    name: Name
    ranks: Ranks
    t: Count
    h: Count
    state: Annotated[str, msgspec.Meta(pattern=r"^(joining|training|paused|left|archive)\Z")]
    loss: float
    tokens_per_s: Measure
    tokens: Count
    since: Measure = 0.0
    data: DataClaim = DataClaim()

    @property
    def lead(self) -> RankAddress:
        return self.ranks[0]


class Ready(Message, frozen=True, kw_only=True):
    """A cluster's answer to the roll call of outer step t: it has a contribution of `weight` trained tokens.

    `lineage`: the hash chain over the rounds it has committed. `spec`: digest of the run spec it trains by.
    `norm`, `fingerprint`, `lowrank`, `H`: see averaging/offer.py. `uplink_mbps`: Mbit/s it can send, 0 if it
    has not been measured. `without`: clusters it will not average with in this outer step, because they broke
    a rule or were too slow.
    """

    protocol: Count = PROTOCOL
    spec: Digest
    cluster_id: ClusterId
    name: Name
    t: Count
    attempt: Count
    lineage: Digest
    weight: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    norm: Measure = 0.0
    fingerprint: Annotated[list[float], msgspec.Meta(max_length=16)] = []
    lowrank: Annotated[list[Count], msgspec.Meta(max_length=4096)] = []
    H: Count = 0
    uplink_mbps: Measure = 0.0
    without: Annotated[list[ClusterId], msgspec.Meta(max_length=256)] = []
    ranks: Ranks

    def peer_of_stage(self, stage: int) -> str | None:
        return peer_of_stage(self.ranks, stage)

    @property
    def client(self) -> bool:
        """Nobody can dial one of its ranks: it averages no part for the others and coordinates nothing."""
        return not all(r.maddrs for r in self.ranks)


class Call(Message, frozen=True, kw_only=True):
    """The roll call's outcome: who averages in (t, attempt), in the order of their cluster ids.

    `ready`: the members' sealed `Ready` messages. `remaining_s`: what was left of the coordinator's deadline.
    """

    t: Count
    attempt: Count
    coordinator: ClusterId
    ready: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=256)]
    remaining_s: Measure


class Envelope(Message, frozen=True, kw_only=True):
    """A sealed message on its way."""

    body: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class CallReply(Message, frozen=True, kw_only=True):
    """The answer to a sealed `Ready`: the call, who to ask instead, why not, or nothing of these: not yet.

    `over`: the round is over without the asker, who can ask for its `Result`. `dropped`: why there is no
    round, for anyone. `left_out`: why the call is without the asker.
    `drifted`: its anchor is not that of the others.
    """

    call: Call | None = None
    over: bool = False
    dropped: Reason = ""
    drifted: bool = False
    redirect: ClusterId | None = None
    refused: Reason = ""
    left_out: Reason = ""


class Pass(Message, frozen=True, kw_only=True):
    """A cluster's word that this libp2p peer is one of its ranks."""

    cluster_id: ClusterId
    peer: PeerName


class Ask(Message, frozen=True, kw_only=True):
    """A question about outer step t: its attempt, its stage, a piece of the stage's file, where it has one.

    `shown`: the sealed Pass of the asker, empty between ranks of one cluster.
    """

    t: Count = 0
    attempt: Count = 0
    stage: Count = 0
    piece: Count = 0
    shown: SealedBytes = b""


class Vote(Message, frozen=True, kw_only=True):
    """A cluster's vote on (t, attempt) of the member list `call`: the digest over all its stages' averages.

    An empty digest is a "no" for `reason`. `accused`: the members that made the averaging fail. `parts`: a
    short digest of what came from each member, so that one that sends other bytes to each can be found.
    """

    cluster_id: ClusterId
    t: Count
    attempt: Count
    call: Digest
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    reason: Reason = ""
    accused: Annotated[list[ClusterId], msgspec.Meta(max_length=256)] = []
    parts: PartDigests = []


class Votes(Message, frozen=True, kw_only=True):
    """The sealed votes on (t, attempt) that a cluster knows. `outcome`: open, committed or aborted, as it
    decided.
    """

    t: Count
    attempt: Count
    votes: Annotated[list[SealedBytes], msgspec.Meta(max_length=256)]
    outcome: Outcome
    shown: SealedBytes = b""


class StageDone(Message, frozen=True, kw_only=True):
    """A rank tells its lead the digests of its stages' averages in (t, attempt); "" if it has none.

    `accused`: which member made it fail, and how. `gone`: whose connection ended, dead or not. `suspects`:
    whom another member blames. `parts`: by stage, see Vote.
    """

    t: Count
    attempt: Count
    digests: Annotated[
        dict[Stage, Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=4096)
    ]
    reason: Reason = ""
    accused: Annotated[dict[ClusterId, Reason], msgspec.Meta(max_length=256)] = {}
    gone: Annotated[dict[ClusterId, Reason], msgspec.Meta(max_length=256)] = {}
    suspects: Annotated[list[ClusterId], msgspec.Meta(max_length=256)] = []
    parts: Annotated[dict[Stage, PartDigests], msgspec.Meta(max_length=4096)] = {}


class Decision(Message, frozen=True, kw_only=True):
    """The lead's answer to its ranks. `digest`: the combined digest of a committed round, for the lineage."""

    outcome: Outcome
    digest: str = ""
    reason: Reason = ""


class Opening(Message, frozen=True, kw_only=True):
    """The first frame of a stream between two members that average a stage. `call`: digest of the member
    list.
    """

    t: Count
    attempt: Count
    stage: Count
    call: Digest
    shown: SealedBytes


class Result(Message, frozen=True, kw_only=True):
    """A committed round, as a member proves it to clusters that were not in it: the call and every member's
    vote.
    """

    call: Call
    stage_digests: Annotated[dict[Stage, Digest], msgspec.Meta(max_length=4096)]
    votes: Annotated[list[SealedBytes], msgspec.Meta(min_length=1, max_length=256)]


class Follow(Message, frozen=True, kw_only=True):
    """How to catch up with rounds we were not in: their results in
    order, and the ranks to fetch the averages from.

    `found` with no results: the others dropped the round too. Neither `found` nor `failed`: not known yet.
    """

    found: bool = False
    results: Annotated[list[Result], msgspec.Meta(max_length=64)] = []
    donor: Annotated[list[RankAddress], msgspec.Meta(max_length=512)] = []
    failed: Reason = ""


class Standing(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Where a cluster stands: outer step `t` is over, `committed_t` was the last that was committed, `h`
    inner steps
    are done since the last boundary.

    `members`: of the last committed round. `in_flight`: the outer
    step of the round on the wire, 0 if there is none. `follows`: of the round it waits for and is not in.
    """

    cluster_id: ClusterId
    t: Count
    h: Count
    committed_t: Count
    lineage: Digest
    members: Annotated[list[ClusterId], msgspec.Meta(max_length=256)]
    in_flight: Count
    follows: Count = 0


class StateClaim(Message, frozen=True, kw_only=True):
    """A cluster's word for the state after outer step t: the root (pieces.py) of each stage's file."""

    cluster_id: ClusterId
    t: Count
    lineage: Digest
    roots: Annotated[dict[Stage, Digest], msgspec.Meta(min_length=1, max_length=4096)]


class StateOffer(Message, frozen=True, kw_only=True):
    """A state that a cluster or an archive can serve: that of outer step t, which `result` proves.

    `files`: by stage. `claims`: sealed, of all clusters that the sender knows to have this state.
    """

    t: Count
    lineage: Digest
    result: Result
    files: Annotated[dict[Stage, FileDigest], msgspec.Meta(min_length=1, max_length=4096)]
    claims: Annotated[list[SealedBytes], msgspec.Meta(min_length=1, max_length=256)]


class Sealed(Message, frozen=True, kw_only=True):
    key: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    payload: bytes


M = TypeVar("M", bound=Message)


def unpack(data: bytes, kind: type[M]) -> M:
    """The message in `data`. Raises NotTrustedError for anything that is not a well-formed `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotTrustedError(f"malformed {kind.__name__} message: {error}") from error


def seal(key: SigningKey, run_id: str, message: Message) -> bytes:
    payload = message.pack()
    return Sealed(
        key=key.public, signature=key.sign(_signed_part(type(message), run_id, payload)), payload=payload
    ).pack()


def open_sealed(data: bytes, run_id: str, kind: type[M]) -> M:
    """The message inside. Raises NotTrustedError unless the key
    that signed it is the cluster it speaks for."""
    sealed = unpack(data, Sealed)
    if not is_signed_by(sealed.key, sealed.signature, _signed_part(kind, run_id, sealed.payload)):
        raise NotTrustedError(f"{kind.__name__} with a wrong signature")
    message = unpack(sealed.payload, kind)
    claimed = getattr(message, "cluster_id", None)
    if claimed != cluster_id_of(sealed.key):
        raise NotTrustedError(
            f"{kind.__name__} speaks for cluster {claimed}, but {cluster_id_of(sealed.key)} signed it"
        )
    return message


def _signed_part(kind: type[Message], run_id: str, payload: bytes) -> bytes:
    return b"\0".join((b"dilocox", kind.__name__.encode(), run_id.encode(), payload))
