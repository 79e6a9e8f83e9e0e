"""Rounds that a cluster was not in: their averages as bytes from one that was, decoded as its members did."""

from dataclasses import dataclass

from p2p_dilocox.averaging.coded import CodedStage
from p2p_dilocox.averaging.division import Division
from p2p_dilocox.averaging.rollcall import Roster, read_call
from p2p_dilocox.averaging.service import Service
from p2p_dilocox.averaging.vote import check_votes
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.lineage import combined_digest, next_lineage, round_digest
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.messages import Ask, RankAddress, Result, peer_of_stage

__all__ = ["Proven", "decode_average", "fetch_average", "read_result"]


@dataclass(frozen=True)
class Proven:
    """A round whose members prove that they committed it. digests: by stage, `digest` over all of them."""

    roster: Roster
    digests: dict[int, str]
    digest: str

    @property
    def lineage(self) -> str:
        """After this round."""
        return next_lineage(self.roster.parent, self.roster.t, self.roster.ids, self.digest)


def read_result(result: Result, run_id: str, gate: Gate, weight_cap: float) -> Proven:
    """Check the signatures and votes of a result. Raises NotTrustedError."""
    roster = read_call(result.call, run_id, gate, weight_cap)
    digests = {int(stage): digest for stage, digest in result.stage_digests.items()}
    digest = combined_digest(digests)
    check_votes(result.votes, run_id, roster.t, roster.key, roster.ids, digest)
    return Proven(roster, digests, digest)


async def fetch_average(
    service: Service, donor: list[RankAddress], result: Result, stage: int, division: Division
) -> list[bytes]:
    """The encoded average of one stage, in chunks; NotTrustedError unless it has the result's digest."""
    t = result.call.t
    peer = peer_of_stage(donor, stage)
    if peer is None:
        raise NotTrustedError(f"outer step {t}: the donor has nobody for stage {stage}")
    pieces = service.fetch(peer, "average", Ask(t=t, stage=stage), division.most_bytes())
    chunks = [data async for data in pieces]
    if round_digest(chunks) != result.stage_digests.get(str(stage)):
        raise NotTrustedError(f"the average of outer step {t}, stage {stage} is not what was committed")
    return chunks


def decode_average(outer: OuterState, division: Division, chunks: list[bytes]) -> Average:
    """Raises NotTrustedError."""
    try:
        p, q = division.decode(chunks)
    except ValueError as error:
        raise NotTrustedError(f"a committed average cannot be decoded: {error}") from error
    code = CodedStage(outer, division.layout)
    code.orthonormalise(p)
    return code.decode(p, q)
