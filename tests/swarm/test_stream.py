"""Streams between two real peers: what is refused, when silence ends them, and who may open one."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.gate import Gate
from p2p_dilocox.swarm.identity import SigningKey
from p2p_dilocox.swarm.messages import Envelope, Pass, seal
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.stream import Frame, Refused, Silent, Stream, dial, serve

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
ORGANISER = SigningKey.generate().public
NOBODY = "12D3KooWKrsNNSqV8PpeGJM2CTxwQKz67SJQLUCiTahKMhgKLqb9"


@asynccontextmanager
async def two_peers() -> AsyncIterator[tuple[Node, Node]]:
    first = await Node.start(run_id="r", organiser=ORGANISER, host_maddrs=LOOPBACK)
    second = await Node.start(
        run_id="r", organiser=ORGANISER, host_maddrs=LOOPBACK, initial_peers=await first.maddrs()
    )
    try:
        yield first, second
    finally:
        await second.close()
        await first.close()


def between(answer: Callable[[Stream], Awaitable[None]], ask: Callable[[Stream], Awaitable[None]]) -> None:
    """One stream: `ask` at the side that dials, `answer` at the other."""

    async def run() -> None:
        async with two_peers() as (first, second):
            await serve(first.p2p, "x", answer)
            stream = await dial(second.p2p, first.peer_id, "x", 10.0)
            try:
                await ask(stream)
            finally:
                stream.close()

    asyncio.run(run())


def test_a_request_that_fails_or_is_given_up_leaves_no_socket_open() -> None:
    """hivemind by itself leaves it to the garbage collector: as long as somebody has the error, or for good
    if the event loop ends first."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await ask(f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}")

    async def ask(silent: str) -> None:
        async with two_peers() as (first, _):
            before, errors = open_files(), []
            for _ in range(3):
                with pytest.raises(ControlFailure) as error:  # nobody knows where it lives
                    await dial(first.p2p, NOBODY, "x", 10.0)
                errors.append(error)
            with pytest.raises(TimeoutError) as error:  # takes the call, and says nothing
                await within(first.p2p._client.connect(PeerID.from_base58(NOBODY), [Multiaddr(silent)]), 0.5)
            await asyncio.sleep(0.1)
            assert open_files() == before

    asyncio.run(run())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def raw(stream: Stream, data: bytes) -> None:
    stream._writer.write(data)  # what a hostile peer would do
    await stream._writer.drain()


def test_frames_arrive_as_they_were_sent_and_are_counted() -> None:
    bodies = [b"", b"x", bytes(range(256)) * 4096]

    async def echo(stream: Stream) -> None:
        for _ in bodies:
            kind, body = await stream.receive(1 << 21, 10.0)
            await stream.send(kind, body, 10.0)

    async def ask(stream: Stream) -> None:
        for body in bodies:
            await stream.send(Frame.AVERAGE, body, 10.0)
            assert await stream.receive(1 << 21, 10.0) == (Frame.AVERAGE, body)
        assert stream.sent == stream.received == sum(5 + len(b) for b in bodies)

    between(echo, ask)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"\x03\xff\xff\xff\xff", "announced a frame of 4294967295 bytes, at most 100 are due"),
        (b"\x03\x65\x00\x00\x00", "announced a frame of 101 bytes"),
        (b"\xc8\x00\x00\x00\x00", "unknown kind 200"),
    ],
)
def test_a_frame_that_is_not_due_is_refused_before_its_body_is_read(data: bytes, sentence: str) -> None:
    async def answer(stream: Stream) -> None:
        await stream.receive(100, 10.0)

    async def ask(stream: Stream) -> None:
        await raw(stream, data)
        with pytest.raises(Refused, match=sentence):
            await stream.receive(100, 10.0)

    between(answer, ask)


def test_a_refusal_longer_than_a_reason_is_refused_itself() -> None:
    async def answer(stream: Stream) -> None:
        await raw(stream, b"\x06\x00\x00\x10\x00" + b"x" * 2000)
        await asyncio.sleep(10.0)

    async def ask(stream: Stream) -> None:
        with pytest.raises(NotTrustedError, match="1048576 bytes"):
            await stream.receive(1 << 21, 10.0)

    between(answer, ask)


def test_who_sends_nothing_or_half_a_frame_or_takes_nothing_is_given_up() -> None:
    async def answer(stream: Stream) -> None:
        await raw(stream, b"\x03\x0a\x00\x00\x00half")
        await asyncio.sleep(30.0)

    async def ask(stream: Stream) -> None:
        with pytest.raises(Silent, match=r"sent nothing for 0\.3 s"):
            await stream.receive(100, 0.3)
        with pytest.raises(Silent, match=r"took nothing for 0\.3 s"):
            for _ in range(1000):
                await stream.send(Frame.DATA, bytes(1 << 20), 0.3)

    between(answer, ask)


def test_a_slow_sender_that_goes_on_is_waited_for() -> None:
    async def answer(stream: Stream) -> None:
        await raw(stream, b"\x03\x0a\x00\x00\x00")
        for byte in b"0123456789":
            await asyncio.sleep(0.1)
            await raw(stream, bytes([byte]))

    async def ask(stream: Stream) -> None:
        assert await stream.receive(100, 0.9) == (Frame.DATA, b"0123456789")

    between(answer, ask)


def test_the_end_of_a_peer_is_a_connection_error() -> None:
    async def answer(stream: Stream) -> None:
        await raw(stream, b"\x03\x0a\x00")
        stream.close()

    async def ask(stream: Stream) -> None:
        with pytest.raises(ConnectionError, match="closed"):
            await stream.receive(100, 10.0)

    between(answer, ask)


PEER, OTHER_PEER = (f"12D3KooWKrsNNSqV8PpeGJM2CTxwQKz67SJQLUCiTahKMhgKLqb{n}" for n in (8, 9))


def test_a_pass_is_good_for_one_peer_of_one_run() -> None:
    mine, theirs = SigningKey.generate(), SigningKey.generate()
    gate = Gate(mine, "run", PEER)
    shown = Gate(theirs, "run", OTHER_PEER).own
    assert gate.admit(shown, OTHER_PEER) == theirs.cluster_id
    assert gate.admit(shown, OTHER_PEER) == theirs.cluster_id  # also from memory
    with pytest.raises(NotTrustedError, match="pass of another peer"):
        gate.admit(shown, PEER)
    with pytest.raises(NotTrustedError, match="wrong signature"):
        gate.admit(Gate(theirs, "elsewhere", OTHER_PEER).own, OTHER_PEER)
    forged = seal(theirs, "run", Pass(cluster_id=mine.cluster_id, peer=OTHER_PEER))
    with pytest.raises(NotTrustedError, match="signed it"):
        gate.admit(forged, OTHER_PEER)
    for nonsense in (b"", b"\x80", bytes(1000)):
        with pytest.raises(NotTrustedError):
            gate.admit(nonsense, OTHER_PEER)


def test_a_closed_run_admits_its_members_only() -> None:
    mine, member, stranger = (SigningKey.generate() for _ in range(3))
    gate = Gate(mine, "run", PEER, [mine.cluster_id, member.cluster_id])
    assert gate.admit(Gate(member, "run", OTHER_PEER).own, OTHER_PEER) == member.cluster_id
    with pytest.raises(NotTrustedError, match="not among the 2 members of this run"):
        gate.admit(Gate(stranger, "run", OTHER_PEER).own, OTHER_PEER)


def test_a_peer_still_hears_after_replies_to_calls_that_were_given_up() -> None:
    """hivemind's reader of replies would end at the first reply to a call that has just been cancelled."""

    async def run() -> None:
        async with two_peers() as (first, second):
            peer = PeerID.from_base58(first.peer_id)

            async def answer(request: Envelope, context: P2PContext) -> Envelope:
                await asyncio.sleep(0.1)
                return request

            await first.p2p.add_protobuf_handler("echo", answer, Envelope)

            async def call() -> Envelope:
                reply: Envelope = await second.p2p.call_protobuf_handler(
                    peer, "echo", Envelope(body=b"x"), Envelope
                )
                return reply

            control = second.p2p._client.control
            calls = [asyncio.create_task(call()) for _ in range(3)]
            while sum(not future.done() for future in control._pending_calls.values()) < 3:
                await asyncio.sleep(0.001)
            # As in the moment after a cancel: the call is done, still in the table, and its reply arrives.
            for future in control._pending_calls.values():
                future.cancel()
            open_calls = dict(control._pending_calls)
            await asyncio.sleep(0)
            control._pending_calls.update(open_calls)
            await asyncio.sleep(0.3)
            await asyncio.gather(*calls, return_exceptions=True)
            assert not control._read_task.done()
            assert (await asyncio.wait_for(call(), 5.0)).body == b"x"
            assert all(future.done() for future in control._pending_calls.values())
            await asyncio.sleep(0.2)
            assert not first.p2p._client.control._handler_tasks

    asyncio.run(run())
