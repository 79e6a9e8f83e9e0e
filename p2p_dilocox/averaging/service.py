"""What a rank answers to other peers: the only module that subclasses hivemind (ServicerBase, 1.1.12).

hivemind's averager would run in a forked process with its own matchmaking and lossy result; we use its
libp2p streams and
its DHT, and own the round.
"""

import asyncio
from collections.abc import Callable
from typing import AsyncIterator, Protocol  # noqa: UP035 (hivemind knows a stream by typing's own type)

from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import ServicerBase, StubBase

from p2p_dilocox.averaging.butterfly import Butterfly, ContributionError
from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.messages import (
    Ask,
    CallReply,
    Chunk,
    Decision,
    Envelope,
    Follow,
    Part,
    Result,
    StageDone,
    Standing,
    Votes,
    unpack,
)  # fmt: skip
from p2p_dilocox.swarm.node import Node

__all__ = ["Desk", "Exchanges", "Frame", "Service", "Traffic", "VectorKey", "chunks_of"]

VectorKey = tuple[int, int, int, str, str]  # t, attempt, stage, phase, key of the roll call
_CHUNK_BYTES = 1 << 19
_MAX_EARLY = 64  # vectors that others may ask for before we have started them


class Frame:
    """One message of a stream; hivemind makes it empty and fills it, as protobuf would be."""

    def __init__(self, body: bytes = b"") -> None:
        self.body = body

    def SerializeToString(self) -> bytes:  # noqa: N802
        return self.body

    def ParseFromString(self, data: bytes) -> None:  # noqa: N802
        self.body = bytes(data)


class Traffic:
    """Bytes of averaging messages as handed to and taken from libp2p's sockets."""

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0


class Exchanges:
    """The butterflies in progress, by the vector they average.
    Others may be faster and ask before we start."""

    def __init__(self) -> None:
        self._butterflies: dict[VectorKey, asyncio.Future[tuple[Butterfly, list[str]]]] = {}

    def open(self, key: VectorKey, butterfly: Butterfly, peers: list[str]) -> None:
        """peers: the libp2p peer of each member, in the order of the butterfly's parts."""
        future = self._future(key)
        if not future.done():
            future.set_result((butterfly, peers))

    def close(self, key: VectorKey) -> None:
        future = self._butterflies.pop(key, None)
        if future is not None:
            if future.done() and not future.cancelled():
                future.result()[0].fail(ConnectionError("the round is over"))
            future.cancel()

    async def find(self, key: VectorKey, patience_s: float) -> tuple[Butterfly, list[str]]:
        if key not in self._butterflies and len(self._butterflies) >= _MAX_EARLY:
            raise NotTrustedError(f"{_MAX_EARLY} rounds are open here already")
        future = self._future(key)
        try:
            return await asyncio.wait_for(asyncio.shield(future), patience_s)
        except TimeoutError:
            if not future.done():
                self._butterflies.pop(key, None)
            raise

    def _future(self, key: VectorKey) -> "asyncio.Future[tuple[Butterfly, list[str]]]":
        if key not in self._butterflies:
            self._butterflies[key] = asyncio.get_running_loop().create_future()
        return self._butterflies[key]


class Desk(Protocol):
    """Who answers the short questions; only a cluster's lead (rank 0) has all of it."""

    async def on_hello(self, sealed: bytes) -> Standing: ...
    async def on_ready(self, sealed: bytes) -> CallReply: ...
    async def on_call(self, ask: Ask, peer: str) -> CallReply: ...
    async def on_stage_done(self, done: StageDone, peer: str) -> Decision: ...
    async def on_votes(self, votes: Votes, peer: str) -> Votes: ...
    async def on_standing(self) -> Standing: ...
    async def on_result(self, ask: Ask) -> Result: ...
    async def on_follow(self, ask: Ask, peer: str) -> Follow: ...


class Service(ServicerBase):
    """RPCs of one rank. Handlers raise on bad input; hivemind
    sends the sentence to the caller and goes on."""

    def __init__(
        self,
        node: Node,
        *,
        patience_s: float,
        average_of: Callable[[int, int], list[bytes]],
        snapshot_of: Callable[[int], bytes],
    ) -> None:
        """patience_s: how long others may be ahead of us.
        average_of(t, stage): the encoded average of a recent round.

        snapshot_of(stage): the state a joiner needs, see snapshot.py.
        """
        self.node = node
        self.exchanges = Exchanges()
        self.traffic = Traffic()
        self.desk: Desk | None = None
        self._patience_s, self._average_of, self._snapshot_of = patience_s, average_of, snapshot_of

    async def start(self) -> None:
        await self.add_p2p_handlers(self.node.p2p, namespace=self.node.run_id)

    def stub(self, peer: str) -> StubBase:
        return self.get_stub(self.node.p2p, PeerID.from_base58(peer), namespace=self.node.run_id)

    async def rpc_hello(self, request: Envelope, context: P2PContext) -> Standing:
        return await self._desk().on_hello(request.body)

    async def rpc_ready(self, request: Envelope, context: P2PContext) -> CallReply:
        return await self._desk().on_ready(request.body)

    async def rpc_call(self, request: Ask, context: P2PContext) -> CallReply:
        return await self._desk().on_call(request, str(context.remote_id))

    async def rpc_stage_done(self, request: StageDone, context: P2PContext) -> Decision:
        return await self._desk().on_stage_done(request, str(context.remote_id))

    async def rpc_votes(self, request: Votes, context: P2PContext) -> Votes:
        return await self._desk().on_votes(request, str(context.remote_id))

    async def rpc_standing(self, request: Ask, context: P2PContext) -> Standing:
        return await self._desk().on_standing()

    async def rpc_result(self, request: Ask, context: P2PContext) -> Result:
        return await self._desk().on_result(request)

    async def rpc_follow(self, request: Ask, context: P2PContext) -> Follow:
        return await self._desk().on_follow(request, str(context.remote_id))

    async def rpc_average(self, request: Frame, context: P2PContext) -> AsyncIterator[Frame]:
        ask = unpack(request.body, Ask)
        for chunk in self._average_of(ask.t, ask.stage):
            yield Frame(Chunk(body=chunk).pack())

    async def rpc_snapshot(self, request: Frame, context: P2PContext) -> AsyncIterator[Frame]:
        ask = unpack(request.body, Ask)
        state = await asyncio.get_running_loop().run_in_executor(None, self._snapshot_of, ask.stage)
        for start in range(0, len(state), _CHUNK_BYTES):
            yield Frame(Chunk(body=state[start : start + _CHUNK_BYTES]).pack())

    async def rpc_exchange(self, requests: AsyncIterator[Frame], context: P2PContext) -> AsyncIterator[Frame]:
        """A member's chunks of our part come in, the averages of our part go out, both in order."""
        opening = await anext(aiter(requests))
        first = unpack(opening.body, Part)
        key = (first.t, first.attempt, first.stage, first.phase, first.call)
        butterfly, peers = await self.exchanges.find(key, self._patience_s)
        peer = str(context.remote_id)
        if peer not in peers:
            raise NotTrustedError(
                f"{peer} is not in the roll call of outer step {first.t}, stage {first.stage}"
            )
        member = peers.index(peer)
        self.traffic.received += len(opening.body)
        taking = asyncio.create_task(self._take_all(butterfly, member, first, key, requests))
        try:
            async for data in butterfly.averages():
                yield self._outgoing(key, data)
            await taking
        finally:
            taking.cancel()

    async def exchange(self, key: VectorKey, butterfly: Butterfly, peers: list[str]) -> None:
        """Run `butterfly` with the other members until its average is complete. Raises if it cannot be."""
        self.exchanges.open(key, butterfly, peers)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(butterfly.add_own())
                for member, peer in enumerate(peers):
                    if member != butterfly.me:
                        tasks.create_task(self._trade(key, butterfly, member, peer))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _trade(self, key: VectorKey, butterfly: Butterfly, member: int, peer: str) -> None:
        async def outgoing() -> AsyncIterator[Frame]:
            async for data in butterfly.contributions(member):
                yield self._outgoing(key, data)

        expected = len(butterfly.parts[member])
        if not expected:
            return
        index = 0
        try:
            async for frame in await self.stub(peer).rpc_exchange(outgoing()):
                part = self._incoming(frame, key, member)
                if index >= expected:
                    raise ContributionError(member, f"sent more than {expected} averages")
                await butterfly.receive(member, index, part.body)
                index += 1
        except ContributionError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever libp2p or the reducer met ends the round, not the rank)
            raise ConnectionError(f"lost the reducer of part {member}: {error}") from error
        if index < expected:
            raise ConnectionError(f"the reducer of part {member} sent {index} of {expected} averages")

    async def _take_all(
        self, butterfly: Butterfly, member: int, first: Part, key: VectorKey, rest: AsyncIterator[Frame]
    ) -> None:
        expected = len(butterfly.parts[butterfly.me])
        part, index = first, 0
        try:
            while True:
                if index >= expected:
                    raise ContributionError(member, f"sent more than {expected} chunks")
                await butterfly.add(member, index, part.body)
                index += 1
                frame = await anext(aiter(rest), None)
                if frame is None:
                    break
                part = self._incoming(frame, key, member)
            if index < expected:
                raise ContributionError(member, f"sent {index} of {expected} chunks")
        except (ContributionError, NotTrustedError, asyncio.CancelledError) as error:
            ended = isinstance(error, asyncio.CancelledError)
            butterfly.fail(ContributionError(member, "went away") if ended else error)
            raise

    def _outgoing(self, key: VectorKey, body: bytes) -> Frame:
        t, attempt, stage, phase, call = key
        frame = Frame(Part(t=t, attempt=attempt, stage=stage, phase=phase, call=call, body=body).pack())
        self.traffic.sent += len(frame.body)
        return frame

    def _incoming(self, frame: Frame, key: VectorKey, member: int) -> Part:
        self.traffic.received += len(frame.body)
        part = unpack(frame.body, Part)
        if (part.t, part.attempt, part.stage, part.phase, part.call) != key:
            raise ContributionError(
                member, f"sent a chunk of another round, outer step {part.t} stage {part.stage}"
            )
        return part

    def _desk(self) -> Desk:
        if self.desk is None:
            raise NotTrustedError("this rank is not its cluster's lead, or is not ready yet")
        return self.desk


def chunks_of(frames: list[bytes]) -> list[bytes]:
    return [unpack(f, Chunk).body for f in frames]
