"""Tensors on their way: frames over one libp2p stream, each with a limit and a deadline.

hivemind's streams of protobufs take whatever length the other side announces, and a frozen reader stops the
writer for ever. Here the reader names the most it takes, and silence for `patience_s` ends the stream from
both sides.

    frame = kind (1 byte), length of the body (4 bytes, little-endian), body
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from enum import IntEnum

from hivemind.p2p import P2P, PeerID

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.pace import UNLIMITED, Pace
from p2p_dilocox.swarm.patience import within

__all__ = ["Frame", "Refused", "Silent", "Stream", "dial", "serve"]

_REASON_BYTES = 1000


class Frame(IntEnum):
    """Kinds of frames. WAIT says that the sender is alive and has nothing to send yet."""

    CONTRIBUTION = 1
    AVERAGE = 2
    DATA = 3
    WAIT = 4
    END = 5
    REFUSAL = 6


class Silent(ConnectionError):
    """The other side neither sent nor took anything for its patience."""


class Refused(ConnectionError):
    """The other side ended the stream and said why."""


class Stream:
    """One side of a stream. Not for use by two readers or two writers at once."""

    def __init__(
        self,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pace: Pace = UNLIMITED,
    ) -> None:
        self.peer, self._pace = peer, pace
        self.sent = self.received = 0  # bytes, headers included
        self._reader, self._writer = reader, writer

    async def send(self, kind: Frame, body: bytes, patience_s: float) -> None:
        """Raises Silent if nothing leaves for patience_s seconds, ConnectionError if the stream is broken."""
        view = memoryview(kind.to_bytes(1, "little") + len(body).to_bytes(4, "little") + body)
        try:
            for start in range(0, len(view), self._pace.turn_bytes):
                piece = view[start : start + self._pace.turn_bytes]
                await self._pace.turn(len(piece))
                self._writer.write(piece)
                await within(self._writer.drain(), patience_s)
        except TimeoutError:
            raise Silent(f"took nothing for {patience_s:.1f} s") from None
        except OSError as error:
            raise ConnectionError("the connection is gone") from error
        self.sent += len(view)

    async def receive(self, limit: int, patience_s: float) -> tuple[Frame, bytes]:
        """The next frame, with a body of at most `limit` bytes.

        Raises Silent, Refused, ConnectionError, and NotTrustedError for a frame that is too long or of no
        kind.
        """
        kind, length = await self._header(patience_s)
        if length > (_REASON_BYTES if kind == Frame.REFUSAL else limit):
            raise NotTrustedError(f"announced a frame of {length} bytes, at most {limit} are due")
        body = bytearray()
        while len(body) < length:
            body += await self._some(length - len(body), patience_s)
        self.received += 5 + length
        if kind == Frame.REFUSAL:
            raise Refused(bytes(body).decode("utf-8", "replace"))
        return kind, bytes(body)

    async def refuse(self, reason: str) -> None:
        """Tell the other side why this ends, if it still listens."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self.send(Frame.REFUSAL, reason.encode()[:_REASON_BYTES], 1.0)

    async def end(self, patience_s: float, *, wait: bool) -> None:
        """Close; `wait`: when the other side has, which reads what we sent last, or after patience_s."""
        deadline = asyncio.get_running_loop().time() + patience_s
        with contextlib.suppress(ConnectionError, NotTrustedError, TimeoutError):
            while wait:
                left_s = deadline - asyncio.get_running_loop().time()
                await within(self.receive(1 << 22, patience_s), max(0.0, left_s))
        self.close()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the event loop or the socket is closed already
            self._writer.close()

    async def _header(self, patience_s: float) -> tuple[Frame, int]:
        head = bytearray()
        while len(head) < 5:
            head += await self._some(5 - len(head), patience_s)
        try:
            return Frame(head[0]), int.from_bytes(head[1:], "little")
        except ValueError:
            raise NotTrustedError(f"sent a frame of the unknown kind {head[0]}") from None

    async def _some(self, most: int, patience_s: float) -> bytes:
        try:
            data = await within(self._reader.read(most), patience_s)
        except TimeoutError:
            raise Silent(f"sent nothing for {patience_s:.1f} s") from None
        except OSError as error:
            raise ConnectionError("the connection is gone") from error
        if not data:
            raise ConnectionError("the connection was closed")
        return data


async def dial(p2p: P2P, peer: str, name: str, patience_s: float, pace: Pace = UNLIMITED) -> Stream:
    """Open the stream `name` to a peer. Raises what p2pd says, TimeoutError after patience_s."""
    target = PeerID.from_base58(peer)
    _, reader, writer = await within(p2p.call_binary_stream_handler(target, name), patience_s)
    return Stream(peer, reader, writer, pace)


async def serve(
    p2p: P2P, name: str, handle: Callable[[Stream], Awaitable[None]], pace: Pace = UNLIMITED
) -> None:
    """Answer the streams `name` of any peer with `handle`; what it raises is told to the peer."""

    async def accept(info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(getattr(info, "peer_id"))  # noqa: B009 (StreamInfo has no types)
        stream = Stream(peer, reader, writer, pace)
        try:
            await handle(stream)
        except (NotTrustedError, ConnectionError, TimeoutError) as error:
            await stream.refuse(str(error) or "out of time")
        finally:
            stream.close()

    await p2p.add_binary_stream_handler(name, accept)
