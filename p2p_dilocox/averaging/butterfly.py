"""The averaging of one vector by all members of a round, so that all end with the same bytes (rule V1).

    Butterfly   member i  --- its chunks of part k, encoded once --->  member k            (reduce-scatter)
                member i  <-- the averages of those chunks, encoded once ---  member k     (all-gather)
                k decodes the bytes that it sends, like everyone else.
    Gather      every member sends all its chunks to every other; each averages what all of them decode.
                Nothing is encoded twice and nobody waits for a reducer, at (D - 1) instead of 2 (D - 1) / D
                times the bytes.

hivemind's own AllReduce sends each peer the quantised difference to what that peer had sent, so that under
lossy compression every peer ends with another result (measured: int4 results drift apart like a random walk).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from p2p_dilocox.averaging.fault import MemberFault
from p2p_dilocox.compression import Piece, pack_chunk, unpack_chunk

__all__ = ["CHUNK_VALUES", "Averaging", "Butterfly", "Gather", "Terms", "decode_butterfly", "decode_gather"]

CHUNK_VALUES = 1 << 18  # values per message: 139 KB at 4 bits
# How much longer than announced a contribution may be: coding in few bits lengthens a vector, at 2 bits up to
# twofold.
_NORM_SLACK = 2.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Terms:
    """What the members agree on before they average.

    weights: one number per member, not negative, their sum positive. norms: what each member announced as the
    length of its pseudo-gradient; what comes from it may not be longer (rule V5). me: our index. group:
    values that share a scale. codec: an executor of one thread; all arithmetic runs there, never on the event
    loop.
    """

    dtype: torch.dtype
    weights: list[float]
    norms: list[float]
    me: int
    group: int
    codec: Executor


class Averaging(ABC):
    """What both have in common. After `complete`: `average`, and once all was sent `own`, what the others
    decode of us; float32 (float64 if bits is 64) [n]. `chunks`: the bytes that `average` was decoded from,
    per member whose chunks they are.
    """

    def __init__(self, numel: int, terms: Terms) -> None:
        self.weights, self.norms, self.me = terms.weights, terms.norms, terms.me
        self.group, self.codec = terms.group, terms.codec
        self.own, self.average = torch.empty(numel, dtype=terms.dtype), torch.empty(numel, dtype=terms.dtype)
        self.chunks: list[list[bytes]] = []
        self.complete = asyncio.Event()  # `average` is, `own` may lack what others have not been sent yet
        self._energy = [0.0] * len(terms.weights)
        self._vector: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()

    @property
    def members(self) -> range:
        return range(len(self.weights))

    def close(self) -> None:
        """Free the vectors of an averaging that failed: what its tasks have raised refers to it for long."""
        self._vector.cancel()
        self._vector = asyncio.get_running_loop().create_future()
        self.own = self.average = torch.empty(0)
        self.chunks = []

    def set_vector(self, vector: Tensor) -> None:
        """Our own vector is computed; until then others may send theirs already. Same dtype and length as
        `average`.
        """
        if not self._vector.done():
            self._vector.set_result(vector)

    @abstractmethod
    def outgoing(self, member: int) -> list[Piece]:
        """The pieces of our vector that `member` gets."""

    @abstractmethod
    def incoming(self, member: int) -> list[Piece]:
        """The pieces of `member`'s vector that we get."""

    @abstractmethod
    def returned(self, member: int) -> list[Piece]:
        """The pieces of the average that `member` sends us."""

    @abstractmethod
    def averages(self) -> AsyncIterator[bytes]:
        """The encoded averages that everyone gets from us, as each is complete."""

    @abstractmethod
    async def add(self, member: int, index: int, data: bytes) -> None:
        """Take piece `index` of incoming(member). Raises MemberFault if it must not be averaged."""

    @abstractmethod
    async def receive(self, member: int, index: int, data: bytes) -> None:
        """Take piece `index` of returned(member). Raises MemberFault if it cannot be decoded."""

    @abstractmethod
    async def add_own(self) -> None:
        """Contribute to what we average ourselves; returns when that is averaged."""

    async def contributions(self, member: int) -> AsyncIterator[bytes]:
        """Our encoded pieces for `member`, in order. Raises ValueError if our vector is not finite."""
        await asyncio.shield(self._vector)
        for piece in self.outgoing(member):
            yield await self._compute(partial(self._encode_own, piece))

    def frame_bytes(self) -> int:
        """Most that one message may have."""
        pieces = [p for m in self.members for p in (*self.incoming(m), *self.returned(m))]
        return max((max(piece.there(self.group), piece.back(self.group)) for piece in pieces), default=0)

    async def _compute(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self.codec, function)

    def _encode_own(self, piece: Piece) -> bytes:
        values = self._vector.result()[piece.start : piece.end]
        own = self.own[piece.start : piece.end]
        return pack_chunk(values, piece.bits, self.group, piece.top, decoded=own)

    def _decode(self, member: int, piece: Piece, data: bytes) -> Tensor:
        try:
            values = _unpack(data, piece, self.group)
        except ValueError as error:
            raise MemberFault(member, f"sent a chunk that cannot be averaged: {error}") from error
        self._energy[member] += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        length, limit = self._energy[member] ** 0.5, _NORM_SLACK * self.norms[member]
        if not length <= limit and self.weights[member] > 0:
            raise MemberFault(
                member, f"sent a contribution of norm {length:.4g}, announced {self.norms[member]:.4g}"
            )
        return values


class Butterfly(Averaging):
    """parts: per member the pieces that it averages; together they cover the vector once."""

    def __init__(self, parts: list[list[Piece]], terms: Terms) -> None:
        super().__init__(max((p.end for part in parts for p in part), default=0), terms)
        self.parts = parts
        self.chunks = [[b""] * len(part) for part in parts]
        self._sums = [torch.zeros(p.end - p.start, dtype=terms.dtype) for p in parts[self.me]]
        self._added = [0] * len(self._sums)  # of each piece so many members' shares, the first ones
        self._early: list[dict[int, bytes]] = [{} for _ in self._sums]
        loop = asyncio.get_running_loop()
        self._averaged: list[asyncio.Future[bytes]] = [loop.create_future() for _ in parts[self.me]]

    def close(self) -> None:
        super().close()
        self._sums, self._early = [], []

    def outgoing(self, member: int) -> list[Piece]:
        return self.parts[member]

    def incoming(self, member: int) -> list[Piece]:
        return self.parts[self.me]

    def returned(self, member: int) -> list[Piece]:
        return self.parts[member]

    async def averages(self) -> AsyncIterator[bytes]:
        for future in self._averaged:
            yield await asyncio.shield(future)

    async def add(self, member: int, index: int, data: bytes) -> None:
        encoded = await self._compute(lambda: self._accumulate(member, index, data))
        if encoded is not None and not self._averaged[index].done():
            self._averaged[index].set_result(encoded)

    async def receive(self, member: int, index: int, data: bytes) -> None:
        piece = self.parts[member][index]

        def decode() -> None:
            try:
                values = _unpack_average(data, piece, self.group)
            except ValueError as error:
                raise MemberFault(member, f"sent an average that cannot be decoded: {error}") from error
            # A mean is no longer than the longest of what it is the mean of.
            length, limit = (
                float(torch.linalg.vector_norm(values, dtype=torch.float64)),
                _NORM_SLACK * _NORM_SLACK * max(self.norms),
            )
            if not length <= limit:
                raise MemberFault(
                    member, f"sent an average of norm {length:.4g}, at most {limit:.4g} is possible"
                )
            self.average[piece.start : piece.end] = values

        await self._compute(decode)
        self.chunks[member][index] = data
        self._look_if_complete()

    async def add_own(self) -> None:
        index = 0
        async for data in self.contributions(self.me):
            await self.add(self.me, index, data)
            index += 1
        for index, future in enumerate(self._averaged):
            self.chunks[self.me][index] = await asyncio.shield(future)
        self._look_if_complete()

    def _look_if_complete(self) -> None:
        if all(data for part in self.chunks for data in part):
            self.complete.set()

    def _accumulate(self, member: int, index: int, data: bytes) -> bytes | None:
        """The encoded average if this was the last share. In the codec thread: two shares cannot both be the
        last. They are added in the order of members, however they come: sums in floats depend on it.
        """
        piece, early = self.parts[self.me][index], self._early[index]
        if member < self._added[index] or member in early:
            raise MemberFault(member, f"sent chunk {index} twice")
        values = self._decode(member, piece, data)
        early[member] = data
        while (share := early.pop(self._added[index], None)) is not None:
            if share is not data:
                values = _unpack(share, piece, self.group)
            self._sums[index].add_(values, alpha=self.weights[self._added[index]])
            self._added[index] += 1
        return self._finish(index) if self._added[index] == len(self.weights) else None

    def _finish(self, index: int) -> bytes:
        piece, weight = self.parts[self.me][index], self.weights[self.me]
        exact = self._sums[index].div_(sum(self.weights))
        decoded = self.average[piece.start : piece.end]
        data = pack_chunk(exact, piece.return_bits, self.group, piece.return_top, decoded=decoded)
        # What the encoding of the average lost goes into our error buffer, scaled so that our next
        # contribution moves the mean by it: local error feedback with the reducer's residual.
        if weight > 0:
            self.own[piece.start : piece.end] -= exact.sub_(decoded).mul_(sum(self.weights) / weight)
        self._sums[index] = decoded.new_empty(0)
        return data


class Gather(Averaging):
    """pieces: of the whole vector, the same for every member."""

    def __init__(self, pieces: list[Piece], terms: Terms) -> None:
        super().__init__(pieces[-1].end if pieces else 0, terms)
        self.pieces = pieces
        self.chunks = [[b""] * len(pieces) for _ in terms.weights]
        self._encoded: dict[int, bytes] = {}
        self._complete: list[asyncio.Future[None]] = [
            asyncio.get_running_loop().create_future() for _ in pieces
        ]

    def close(self) -> None:
        super().close()
        self._encoded = {}

    def outgoing(self, member: int) -> list[Piece]:
        return self.pieces

    def incoming(self, member: int) -> list[Piece]:
        return self.pieces

    def returned(self, member: int) -> list[Piece]:
        return []

    async def contributions(self, member: int) -> AsyncIterator[bytes]:
        await asyncio.shield(self._vector)
        for index in range(len(self.pieces)):
            yield await self._compute(partial(self._encode_once, index))

    async def averages(self) -> AsyncIterator[bytes]:
        return
        yield  # never: a generator of nothing

    async def add(self, member: int, index: int, data: bytes) -> None:
        await self._compute(lambda: self._keep(member, index, data))
        if all(of_member[index] for of_member in self.chunks) and not self._complete[index].done():
            piece = self.pieces[index]
            shares = [of_member[index] for of_member in self.chunks]
            average = await self._compute(lambda: _mean(shares, piece, self.weights, self.group))
            self.average[piece.start : piece.end] = average
            if not self._complete[index].done():
                self._complete[index].set_result(None)
            if all(future.done() for future in self._complete):
                self.complete.set()

    async def receive(self, member: int, index: int, data: bytes) -> None:
        raise MemberFault(member, "sent an average where there is no reducer")

    async def add_own(self) -> None:
        index = 0
        async for data in self.contributions(self.me):
            await self.add(self.me, index, data)
            index += 1
        if not self.pieces:
            self.complete.set()
        await self.complete.wait()

    def _encode_once(self, index: int) -> bytes:
        """For the first member that is to get it; in the codec thread, so that there is a first."""
        if index not in self._encoded:
            self._encoded[index] = self._encode_own(self.pieces[index])
        return self._encoded[index]

    def _keep(self, member: int, index: int, data: bytes) -> None:
        if self.chunks[member][index]:
            raise MemberFault(member, f"sent chunk {index} twice")
        self._decode(member, self.pieces[index], data)
        self.chunks[member][index] = data


def decode_butterfly(
    chunks: list[bytes], pieces: list[Piece], n: int, group: int, dtype: torch.dtype
) -> Tensor:
    """The averaged vector [n] from its encoded averages, as every member decoded it. Raises ValueError."""
    vector = torch.empty(n, dtype=dtype)
    for data, piece in zip(chunks, pieces, strict=True):
        vector[piece.start : piece.end] = _unpack_average(data, piece, group)
    return vector


def decode_gather(
    chunks: list[bytes], pieces: list[Piece], weights: list[float], n: int, group: int, dtype: torch.dtype
) -> Tensor:
    """The averaged vector [n] from all members' pieces, member by member. Raises ValueError."""
    vector = torch.empty(n, dtype=dtype)
    if len(chunks) != len(pieces) * len(weights):
        raise ValueError(f"{len(chunks)} chunks, expected {len(pieces)} of each of {len(weights)} members")
    for index, piece in enumerate(pieces):
        vector[piece.start : piece.end] = _mean(chunks[index :: len(pieces)], piece, weights, group)
    return vector


def _unpack(data: bytes, piece: Piece, group: int) -> Tensor:
    return unpack_chunk(data, n=piece.end - piece.start, bits=piece.bits, group=group, top=piece.top)


def _unpack_average(data: bytes, piece: Piece, group: int) -> Tensor:
    n = piece.end - piece.start
    return unpack_chunk(data, n=n, bits=piece.return_bits, group=group, top=piece.return_top)


def _mean(shares: list[bytes], piece: Piece, weights: list[float], group: int) -> Tensor:
    """The weighted mean of one piece, summed in the order of the members, so that all get the same bits."""
    total: Tensor | None = None
    for data, weight in zip(shares, weights, strict=True):
        values = _unpack(data, piece, group).mul_(weight)
        total = values if total is None else total.add_(values)
    assert total is not None
    return total.div_(sum(weights))
