"""What a rank answers to other peers: the only module that subclasses hivemind (ServicerBase, 1.1.12).

hivemind's averager would run in a forked process with its own matchmaking and lossy result; we use its libp2p
and its DHT, and own the round. Short questions are RPCs, tensors travel in streams. Whoever asks shows a pass
(rule V6).
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol, TypeVar

import msgspec
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import ServicerBase, StubBase

from p2p_dilocox.averaging.exchange import ABORTED, Exchange, Traffic
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Decision,
    Envelope,
    Follow,
    Message,
    Opening,
    Result,
    StageDone,
    Standing,
    StateOffer,
    Votes,
    unpack,
)  # fmt: skip
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.pace import UNLIMITED, Pace
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.stream import Frame, Stream, dial, serve

__all__ = ["Desk", "ExchangeKey", "Service"]

ExchangeKey = tuple[int, int, int, str]  # t, attempt, stage, key of the roll call
_QUESTION_BYTES = 1 << 16
_SLICE_BYTES = 1 << 18
_MOST_FRAME_BYTES = 1 << 22
_CLOSED_KEPT = 256
_MAX_STREAMS = 64  # open at once by one peer
_MAX_READS = 8  # pieces of a state that are in memory at once, on their way to joiners
M = TypeVar("M", bound=Message)


class Desk(Protocol):
    """Who answers the short questions; only a cluster's lead (rank 0) has all of it. cluster: whose pass was
    shown.
    """

    async def on_hello(self, sealed: bytes, peer: str) -> Standing: ...
    async def on_ready(self, sealed: bytes) -> CallReply: ...
    async def on_call(self, ask: Ask) -> CallReply: ...
    async def on_stage_done(self, done: StageDone) -> Decision: ...
    async def on_votes(self, votes: Votes, cluster: str) -> Votes: ...
    def heard(self, cluster: str) -> None: ...
    async def on_standing(self) -> Standing: ...
    async def on_result(self, ask: Ask) -> Result: ...
    async def on_follow(self, ask: Ask) -> Follow: ...
    async def on_state(self) -> StateOffer: ...


class Service(ServicerBase):
    """RPCs and streams of one rank. Handlers raise on bad input; the sentence goes to the caller, and we go
    on.
    """

    def __init__(
        self,
        node: Node,
        gate: Gate,
        *,
        patience_s: float,
        average_of: Callable[[int, int], list[bytes]],
        piece_of: Callable[[int, int, int], bytes],
        pace: Pace = UNLIMITED,
    ) -> None:
        """patience_s: for a peer that sends or takes nothing, or is ahead of us. average_of(t, stage): the
        encoded average of a round. piece_of(t, stage, piece): of the state after outer step t, see states.py.
        Both read from a disk, in a thread, and raise NotTrustedError for what is not there.
        """
        self.node, self.gate, self._pace = node, gate, pace
        self.traffic = Traffic()
        self.desk: Desk | None = None
        self._own: frozenset[str] = frozenset()
        self._patience_s, self._average_of, self._piece_of = patience_s, average_of, piece_of
        self._exchanges: dict[ExchangeKey, asyncio.Future[Exchange]] = {}
        self._closed: deque[ExchangeKey] = deque(maxlen=_CLOSED_KEPT)
        self._streams: Counter[str] = Counter()
        self._reads = asyncio.Semaphore(_MAX_READS)

    async def start(self, cluster_peers: list[str]) -> None:
        """cluster_peers: of the ranks of our own cluster, the only ones whose internal questions are
        answered.
        """
        self._own = frozenset(cluster_peers)
        await self.add_p2p_handlers(self.node.p2p, namespace=self.node.run_id)
        for name, handle in (
            ("exchange", self._on_exchange),
            ("average", self._on_average),
            ("state", self._on_state),
        ):
            await serve(self.node.p2p, self._stream_name(name), handle, self._pace)

    def stub(self, peer: str) -> StubBase:
        return self.get_stub(self.node.p2p, PeerID.from_base58(peer), namespace=self.node.run_id)

    # --- short questions

    async def rpc_hello(self, request: Envelope, context: P2PContext) -> Standing:
        return await self._desk().on_hello(request.body, str(context.remote_id))

    async def rpc_ready(self, request: Envelope, context: P2PContext) -> CallReply:
        return await self._desk().on_ready(request.body)

    async def rpc_votes(self, request: Votes, context: P2PContext) -> Votes:
        return await self._desk().on_votes(request, self._admit(request.shown, context.remote_id))

    async def rpc_standing(self, request: Ask, context: P2PContext) -> Standing:
        self._admit(request.shown, context.remote_id)
        return await self._desk().on_standing()

    async def rpc_result(self, request: Ask, context: P2PContext) -> Result:
        self._admit(request.shown, context.remote_id)
        return await self._desk().on_result(request)

    async def rpc_state(self, request: Ask, context: P2PContext) -> StateOffer:
        self._admit(request.shown, context.remote_id)
        return await self._desk().on_state()

    async def rpc_call(self, request: Ask, context: P2PContext) -> CallReply:
        self._require_own(context)
        return await self._desk().on_call(request)

    async def rpc_stage_done(self, request: StageDone, context: P2PContext) -> Decision:
        self._require_own(context)
        return await self._desk().on_stage_done(request)

    async def rpc_follow(self, request: Ask, context: P2PContext) -> Follow:
        self._require_own(context)
        return await self._desk().on_follow(request)

    # --- streams

    def open_exchange(self, key: ExchangeKey, exchange: Exchange) -> None:
        """From now on the streams for `key` are the exchange's, also those that came before."""
        future = self._future(key)
        if not future.done():
            future.set_result(exchange)

    def close_exchange(self, key: ExchangeKey) -> None:
        self._closed.append(key)
        future = self._exchanges.pop(key, None)
        if future is not None:
            future.cancel()

    async def dial_exchange(self, key: ExchangeKey, peer: str) -> Stream:
        t, attempt, stage, call = key
        opening = Opening(t=t, attempt=attempt, stage=stage, call=call, shown=self.gate.own)
        return await self._ask(peer, "exchange", opening.pack())

    async def fetch(self, peer: str, what: str, ask: Ask, most_bytes: int) -> AsyncIterator[bytes]:
        """`what` ("average" or a piece of a "state") of a peer, frame by frame.

        Raises NotTrustedError if it sends more than most_bytes, Silent, Refused or ConnectionError if it
        stops.
        """
        question = msgspec.structs.replace(ask, shown=self.gate.own)
        stream, received = await self._ask(peer, what, question.pack()), 0
        try:
            while True:
                kind, data = await stream.receive(_MOST_FRAME_BYTES, self._patience_s)
                if kind == Frame.END:
                    return
                received += len(data)
                if kind != Frame.DATA or received > most_bytes:
                    raise NotTrustedError(f"{peer} sends more than {most_bytes} bytes of {what}")
                self.traffic.received += len(data)
                yield data
        finally:
            stream.close()

    async def _ask(self, peer: str, name: str, question: bytes) -> Stream:
        stream = await dial(self.node.p2p, peer, self._stream_name(name), self._patience_s, self._pace)
        try:
            await stream.send(Frame.DATA, question, self._patience_s)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _on_exchange(self, stream: Stream) -> None:
        opening = await self._question(stream, Opening)
        self._admit(opening.shown, stream.peer)
        key = (opening.t, opening.attempt, opening.stage, opening.call)
        if key in self._closed:
            raise ConnectionError(f"{ABORTED}the round is over here")
        with self._counted(stream):
            future = self._future(key)
            try:
                exchange = await within(asyncio.shield(future), self._patience_s)
            except TimeoutError:
                if not future.done():
                    self._exchanges.pop(key, None)
                raise NotTrustedError(
                    f"no round of outer step {opening.t} with that member list here"
                ) from None
            await exchange.attach(stream)

    async def _on_average(self, stream: Stream) -> None:
        ask = await self._question(stream, Ask)
        self._admit(ask.shown, stream.peer)
        with self._counted(stream):
            for chunk in await asyncio.to_thread(self._average_of, ask.t, ask.stage):
                await stream.send(Frame.DATA, chunk, self._patience_s)
            await stream.send(Frame.END, b"", self._patience_s)

    async def _on_state(self, stream: Stream) -> None:
        ask = await self._question(stream, Ask)
        self._admit(ask.shown, stream.peer)
        with self._counted(stream):
            async with self._reads:
                view = memoryview(await asyncio.to_thread(self._piece_of, ask.t, ask.stage, ask.piece))
                for start in range(0, len(view), _SLICE_BYTES):
                    await stream.send(Frame.DATA, bytes(view[start : start + _SLICE_BYTES]), self._patience_s)
            await stream.send(Frame.END, b"", self._patience_s)

    async def _question(self, stream: Stream, kind: type[M]) -> M:
        _, body = await stream.receive(_QUESTION_BYTES, self._patience_s)
        return unpack(body, kind)

    def _admit(self, shown: bytes, peer: object) -> str:
        cluster = self.gate.admit(shown, str(peer))
        if self.desk is not None:
            self.desk.heard(cluster)
        return cluster

    def _require_own(self, context: P2PContext) -> None:
        if str(context.remote_id) not in self._own:
            raise NotTrustedError(f"{context.remote_id} is no rank of this cluster")

    @contextlib.contextmanager
    def _counted(self, stream: Stream) -> Iterator[None]:
        if self._streams[stream.peer] >= _MAX_STREAMS:
            raise NotTrustedError(f"{stream.peer} has {_MAX_STREAMS} streams open here already")
        self._streams[stream.peer] += 1
        try:
            yield
        finally:
            self._streams[stream.peer] -= 1
            if not self._streams[stream.peer]:
                del self._streams[stream.peer]

    def _future(self, key: ExchangeKey) -> "asyncio.Future[Exchange]":
        if key not in self._exchanges:
            self._exchanges[key] = asyncio.get_running_loop().create_future()
        return self._exchanges[key]

    def _stream_name(self, name: str) -> str:
        return f"{self.node.run_id}::dilocox-{name}"

    def _desk(self) -> Desk:
        if self.desk is None:
            raise NotTrustedError("this rank is not its cluster's lead, or is not ready yet")
        return self.desk
