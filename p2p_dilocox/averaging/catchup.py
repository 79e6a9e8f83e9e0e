"""Rounds that a cluster was not in: their averages as bytes from one that was, decoded as its members did."""

import asyncio
from collections.abc import Sequence

from p2p_dilocox.averaging.butterfly import decode_chunks
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
    outer: OuterState, layout: Layout, chunks: list[bytes], shares: Sequence[float]
) -> Average:
    """shares: what the members cut the round by, see chunk_ranges. Raises NotTrustedError."""
    p_pieces = [piece for part in chunk_ranges(layout, "p", shares) for piece in part]
    q_pieces = [piece for part in chunk_ranges(layout, "q", shares) for piece in part]
    group = layout.group
    try:
        p = decode_chunks(chunks[: len(p_pieces)], p_pieces, layout.phase_numel("p"), group, layout.dtype)
        q = decode_chunks(chunks[len(p_pieces) :], q_pieces, layout.phase_numel("q"), group, layout.dtype)
    except ValueError as error:
        raise NotTrustedError(f"a committed average cannot be decoded: {error}") from error
    code = CodedStage(outer, layout)
    code.orthonormalise(p)
    return code.decode(p, q)
