"""Rounds that a cluster was not in: their averages as bytes from one that was, decoded as its members did."""

import asyncio

from p2p_dilocox.averaging.butterfly import Wire, decode_chunks
from p2p_dilocox.averaging.coded import CodedStage, chunk_ranges
from p2p_dilocox.averaging.service import Frame, Service
from p2p_dilocox.compression import Layout
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.lineage import round_digest
from p2p_dilocox.outer import Average, OuterState
from p2p_dilocox.swarm.messages import Ask, Chunk, Result, unpack

__all__ = ["decode_average", "fetch_average"]


async def fetch_average(
    service: Service, peer: str, result: Result, stage: int, timeout_s: float
) -> list[bytes]:
    """The encoded average of one stage, in chunks; NotTrustedError unless it has the result's digest."""
    ask = Ask(t=result.t, stage=stage)
    frames = await service.stub(peer).rpc_average(Frame(ask.pack()))
    async with asyncio.timeout(timeout_s):
        chunks = [unpack(frame.body, Chunk).body async for frame in frames]
    if round_digest(chunks) != result.stage_digests.get(str(stage)):
        raise NotTrustedError(
            f"the average of outer step {result.t}, stage {stage} is not what was committed"
        )
    return chunks


def decode_average(
    outer: OuterState, layout: Layout, wire: Wire, chunks: list[bytes], num_members: int
) -> Average:
    """num_members: of the round, which decides where its chunks were cut. Raises NotTrustedError."""
    p_ranges = [r for part in chunk_ranges(layout, "p", num_members) for r in part]
    q_ranges = [r for part in chunk_ranges(layout, "q", num_members) for r in part]
    try:
        p = decode_chunks(chunks[: len(p_ranges)], p_ranges, layout.phase_numel("p"), wire, layout.dtype)
        q = decode_chunks(chunks[len(p_ranges) :], q_ranges, layout.phase_numel("q"), wire, layout.dtype)
    except ValueError as error:
        raise NotTrustedError(f"a committed average cannot be decoded: {error}") from error
    code = CodedStage(outer, layout)
    code.orthonormalise(p)
    return code.decode(p, q)
