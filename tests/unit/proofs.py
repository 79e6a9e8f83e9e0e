"""Committed rounds, signed by members that we make up: what clusters keep and prove to each other."""

import hashlib
from collections.abc import Sequence

from p2p_dilocox.averaging.catchup import read_result
from p2p_dilocox.averaging.kept import KeptRounds
from p2p_dilocox.lineage import combined_digest, round_digest
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Call, RankAddress, Ready, Result, Vote, seal

RUN = "run"
PEER = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"
RANKS = [RankAddress(peer=PEER, maddrs=["/ip4/127.0.0.1/tcp/1"], stages=[0, 1])]
CAP = 1000.0


def gate_of(key: SigningKey) -> Gate:
    return Gate(key, RUN, PEER)


def averages(t: int) -> dict[int, list[bytes]]:
    """Of both stages, some chunks each."""
    return {s: [hashlib.sha256(f"{t} {s} {c}".encode()).digest() * 8 for c in range(3)] for s in range(2)}


def committed(
    keys: list[SigningKey], t: int, lineage: str, chunks: dict[int, list[bytes]],
    lowrank: Sequence[int] = (), H: int = 0,  # noqa: N803
) -> Result:  # fmt: skip
    """The proof that the owners of `keys` committed outer step t with these averages, after `lineage`."""
    ready = [
        seal(
            key, RUN,
            Ready(
                spec="0" * 64, cluster_id=key.cluster_id, name="x", t=t, attempt=0, lineage=lineage,
                weight=1.0, ranks=RANKS, lowrank=list(lowrank), H=H,
            ),
        )
        for key in keys
    ]  # fmt: skip
    call = Call(t=t, attempt=0, coordinator=keys[0].cluster_id, ready=ready, remaining_s=1.0)
    digests = {str(stage): round_digest(of_stage) for stage, of_stage in chunks.items()}
    combined = combined_digest({int(s): d for s, d in digests.items()})
    roster_key = _roster_key(call, keys[0])
    votes = [
        seal(key, RUN, Vote(cluster_id=key.cluster_id, t=t, attempt=0, call=roster_key, digest=combined))
        for key in keys
    ]
    return Result(call=call, stage_digests=digests, votes=votes)


def keep_rounds(kept: KeptRounds, keys: list[SigningKey], lineage: str, first: int, last: int) -> str:
    """Rounds first..last after `lineage`; returns the lineage after the last."""
    for t in range(first, last + 1):
        result = committed(keys, t, lineage, averages(t))
        kept.remember(t, result, averages(t))
        lineage = read_result(result, RUN, gate_of(keys[0]), CAP).lineage
    return lineage


def _roster_key(call: Call, key: SigningKey) -> str:
    from p2p_dilocox.averaging.rollcall import read_call

    return read_call(call, RUN, gate_of(key), CAP).key
