"""Members that speak the protocol and break a rule: each offence changes one thing of an honest one."""

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import torch

from p2p_dilocox.averaging import butterfly, exchange, vote
from p2p_dilocox.averaging.fault import Aborted
from p2p_dilocox.compression import HEADER_BYTES, Piece, pack_chunk
from p2p_dilocox.swarm.messages import Vote, Votes, seal
from p2p_dilocox.swarm.stream import Frame, Stream

if TYPE_CHECKING:
    from .member import Member

__all__ = ["CONTRIBUTIONS", "REDUCERS", "become"]

Change = Callable[[bytes, Piece], list[bytes]]
_VALUE = struct.Struct(
    "<f"
)  # a run with hostile members has 32 bits per value, so that all numbers can be said


def _with_value(value: float) -> Change:
    """The first value of every chunk replaced."""
    code = _VALUE.pack(value)
    return lambda data, _: [data[:HEADER_BYTES] + code + data[HEADER_BYTES + len(code) :]]


def _zeros(n: int) -> bytes:
    return pack_chunk(torch.zeros(n), 32, 64)


CONTRIBUTIONS: dict[str, Change] = {
    "nan": _with_value(float("nan")),
    "inf": _with_value(float("inf")),
    "1e38": _with_value(1e38),
    "wrong shape": lambda _, piece: [_zeros(piece.end - piece.start + 64)],
    "one element": lambda _, piece: [_zeros(1)],
    "too many chunks": lambda data, _: [data, data],
    "half a chunk": lambda data, _: [data[: len(data) // 2]],
    "nothing": lambda _data, _piece: [b""],
}
REDUCERS: dict[str, Change] = {
    "nan average": _with_value(float("nan")),
    "1e38 average": _with_value(1e38),
    "short average": lambda data, _: [data[:-4]],
}


def become(offence: str, member: "Member") -> None:
    """From now on, until the next offence; "" is to be honest again."""
    _honest()
    if offence in CONTRIBUTIONS:
        _contribute(CONTRIBUTIONS[offence])
    elif offence in REDUCERS:
        _reduce(REDUCERS[offence])
    elif offence:
        {
            "long frame": _announce_much,
            "two averages": _tell_two_averages,
            "forged vote": lambda: _forge(member),
            "silent": _never_begin,
        }[offence]()


_ORIGINALS: list[tuple[type, str, Any]] = [
    (butterfly.Averaging, "contributions", butterfly.Averaging.contributions),
    (butterfly.Butterfly, "averages", butterfly.Butterfly.averages),
    (exchange.Exchange, "run", exchange.Exchange.run),
    (vote.Ballot, "message", vote.Ballot.message),
    (Stream, "send", Stream.send),
]


def _honest() -> None:
    for owner, name, function in _ORIGINALS:
        setattr(owner, name, function)


def _original(name: str) -> Any:
    return next(function for _, known, function in _ORIGINALS if known == name)


def _contribute(change: Change) -> None:
    honest = _original("contributions")

    async def contributions(self: butterfly.Averaging, member: int) -> AsyncIterator[bytes]:
        pieces = iter(self.outgoing(member))
        async for data in honest(self, member):
            piece = next(pieces)
            for lie in [data] if member == self.me else change(data, piece):
                yield lie

    setattr(butterfly.Averaging, "contributions", contributions)  # noqa: B010 (mypy: a method)


def _reduce(change: Change) -> None:
    honest = _original("averages")

    async def averages(self: butterfly.Butterfly) -> AsyncIterator[bytes]:
        pieces = iter(self.parts[self.me])
        async for data in honest(self):
            for lie in change(data, next(pieces)):
                yield lie

    setattr(butterfly.Butterfly, "averages", averages)  # noqa: B010


def _tell_two_averages() -> None:
    """Every member gets other bytes, each of them plausible."""
    honest, count = _original("averages"), itertools.count(1)

    async def averages(self: butterfly.Butterfly) -> AsyncIterator[bytes]:
        lie = _VALUE.pack(1e-3 * next(count))
        async for data in honest(self):
            yield data[:HEADER_BYTES] + lie + data[HEADER_BYTES + len(lie) :]

    setattr(butterfly.Butterfly, "averages", averages)  # noqa: B010


def _announce_much() -> None:
    honest = _original("send")

    async def send(self: Stream, kind: Frame, body: bytes, patience_s: float) -> None:
        if kind == Frame.CONTRIBUTION:
            self._writer.write(kind.to_bytes(1, "little") + b"\xff\xff\xff\xff")
        await honest(self, kind, body, patience_s)

    setattr(Stream, "send", send)  # noqa: B010


def _never_begin() -> None:
    async def run(self: exchange.Exchange) -> None:
        await asyncio.sleep(self._budget.limit_s)
        raise Aborted("silent to the end")

    setattr(exchange.Exchange, "run", run)  # noqa: B010


def _forge(member: "Member") -> None:
    """Votes of all others against the round, signed by ourselves."""
    honest = _original("message")

    def message(self: vote.Ballot) -> Votes:
        told: Votes = honest(self)
        forged = [
            seal(
                member.key,
                self._run_id,
                Vote(cluster_id=m, t=self.t, attempt=self.attempt, call=self._call or "0" * 64, digest=""),
            )
            for m in self.members
            if m != self.me
        ]
        return Votes(t=told.t, attempt=told.attempt, votes=[*told.votes, *forged], outcome=told.outcome)

    setattr(vote.Ballot, "message", message)  # noqa: B010
