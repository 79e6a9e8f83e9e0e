"""One butterfly AllReduce: every member averages one part of a
vector for all, and all get the same bytes (rule V1).

    member i  --- its chunk of part k, encoded once --->  member k      (reduce-scatter)
    member i  <-- the average of that chunk, encoded once ---  member k (all-gather; k decodes those bytes
    too)

hivemind's own AllReduce sends each peer the quantised difference to what that peer had sent, so that under
lossy
compression every peer ends with another result (measured: int4 results drift apart like a random walk).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from p2p_dilocox.compression import Piece, pack_chunk, round_trip, unpack_chunk

__all__ = ["CHUNK_VALUES", "Butterfly", "ContributionError", "decode_chunks"]

CHUNK_VALUES = 1 << 18  # values per message: 139 KB at 4 bits, far below libp2p's 4 MiB
_T = TypeVar("_T")


class ContributionError(Exception):
    """A member sent something that must not be averaged. `member`: its index."""

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(reason)
        self.member = member


@dataclass
class _Sum:
    """The running weighted sum of one chunk of our part. Whose share is in it decides when it is complete."""

    total: Tensor
    members: set[int] = field(default_factory=set)


class Butterfly:
    """The averaging of `vector` over `weights`; our part is parts[me].

    vector: float32 (float64 if bits is 64) [n]. parts: per member its chunks; together they cover the vector
    once and each starts at a multiple of `group`, whose values share a scale. weights: one positive number
    per member.
    All arithmetic runs in `codec`, an executor of one thread, never on the event loop.
    """

    def __init__(
        self,
        vector: Tensor,
        parts: list[list[Piece]],
        weights: list[float],
        me: int,
        group: int,
        codec: Executor,
    ) -> None:
        self.vector, self.parts, self.weights, self.me = vector, parts, weights, me
        self.group, self.codec = group, codec
        self.own = torch.empty_like(vector)  # what the others decode of us
        self.average = torch.empty_like(vector)
        self.chunks: list[list[bytes]] = [[b""] * len(part) for part in parts]  # the encoded average
        self._sums = [_Sum(torch.zeros(p.end - p.start, dtype=vector.dtype)) for p in parts[me]]
        loop = asyncio.get_running_loop()
        self._averaged: list[asyncio.Future[bytes]] = [loop.create_future() for _ in parts[me]]

    async def contributions(self, member: int) -> AsyncIterator[bytes]:
        """Our encoded chunks of `member`'s part, in order."""
        for piece in self.parts[member]:
            yield await self._compute(partial(self._encode_own, piece))

    async def add(self, member: int, index: int, data: bytes) -> None:
        """Take `member`'s contribution to chunk `index` of our part.
        Raises ContributionError if it is unacceptable."""
        encoded = await self._compute(lambda: self._accumulate(member, index, data))
        if encoded is not None and not self._averaged[index].done():
            self._averaged[index].set_result(encoded)

    async def add_own(self) -> None:
        index = 0
        async for data in self.contributions(self.me):
            await self.add(self.me, index, data)
            index += 1
        for index, future in enumerate(self._averaged):
            self.chunks[self.me][index] = await asyncio.shield(future)

    async def averages(self) -> AsyncIterator[bytes]:
        """The encoded average of our part, chunk by chunk as each is complete."""
        for future in self._averaged:
            yield await asyncio.shield(future)

    async def receive(self, member: int, index: int, data: bytes) -> None:
        """Take the average of chunk `index` of `member`'s part from its reducer."""
        start, end, _, bits = self.parts[member][index]

        def decode() -> None:
            try:
                self.average[start:end] = unpack_chunk(data, n=end - start, bits=bits, group=self.group)
            except ValueError as error:
                raise ContributionError(member, f"sent an average that cannot be decoded: {error}") from error

        await self._compute(decode)
        self.chunks[member][index] = data

    def fail(self, error: BaseException) -> None:
        """End every wait for our part with `error`."""
        for future in self._averaged:
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved here: nobody may be waiting yet

    async def _compute(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self.codec, function)

    def _encode_own(self, piece: Piece) -> bytes:
        values = self.vector[piece.start : piece.end]
        self.own[piece.start : piece.end] = round_trip(values, piece.bits, self.group)
        return pack_chunk(values, piece.bits, self.group)

    def _accumulate(self, member: int, index: int, data: bytes) -> bytes | None:
        """The encoded average if this was the last share. In the codec
        thread, so two shares cannot both be the last."""
        start, end, bits, _ = self.parts[self.me][index]
        sum_ = self._sums[index]
        if member in sum_.members:
            raise ContributionError(member, f"sent chunk {index} twice")
        try:
            values = unpack_chunk(data, n=end - start, bits=bits, group=self.group)
        except ValueError as error:
            raise ContributionError(member, f"sent a chunk that cannot be averaged: {error}") from error
        sum_.total.add_(values, alpha=self.weights[member])
        sum_.members.add(member)
        return self._finish(index) if len(sum_.members) == len(self.weights) else None

    def _finish(self, index: int) -> bytes:
        start, end, _, bits = self.parts[self.me][index]
        exact = self._sums[index].total.div_(sum(self.weights))
        data = pack_chunk(exact, bits, self.group)
        decoded = unpack_chunk(data, n=end - start, bits=bits, group=self.group)
        self.average[start:end] = decoded
        # What the encoding of the average lost goes into our error buffer, scaled so that our next
        # contribution moves the mean by it: local error feedback with the reducer's residual.
        self.own[start:end] -= exact.sub_(decoded).mul_(sum(self.weights) / self.weights[self.me])
        return data


def decode_chunks(chunks: list[bytes], pieces: list[Piece], n: int, group: int, dtype: torch.dtype) -> Tensor:
    """The averaged vector [n] from its encoded chunks, as every member decoded it. Raises ValueError."""
    vector = torch.empty(n, dtype=dtype)
    if len(chunks) != len(pieces):
        raise ValueError(f"{len(chunks)} chunks, expected {len(pieces)}")
    for data, (start, end, _, bits) in zip(chunks, pieces, strict=True):
        vector[start:end] = unpack_chunk(data, n=end - start, bits=bits, group=group)
    return vector
