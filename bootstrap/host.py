"""A DHT node with a lasting identity that keeps the signed spec of a run alive and shows who is there."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import click

from p2p_dilocox.compression import Layout
from p2p_dilocox.errors import DilocoxError
from p2p_dilocox.runspec import RunSpec
from p2p_dilocox.state_dir import write_atomic
from p2p_dilocox.swarm.identity import SigningKey, ensure_libp2p_identity
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.patience import within
from p2p_dilocox.swarm.records import RUN_LIFE_S
from p2p_dilocox.swarm.signed import SignedRun, sign_run

from .addresses import linkable, reach_warning
from .archive import Archive
from .board import Board, open_board

__all__ = ["host_run"]

_POLL_S = 2.0
_CLOSE_S = 2.0


def host_run(
    spec: RunSpec, text: str, state: Path, *, listen: Sequence[str], announce: Sequence[str], archive: int
) -> None:
    """Sign `text`, which is `spec`, with the key in `state` and serve it until SIGINT, SIGTERM or SIGHUP.

    archive: how many states to keep. Raises LinkError, StateError or NotTrustedError.
    """
    key = SigningKey.load_or_create(state / "organiser.key")
    ensure_libp2p_identity(state / "node.key")
    asyncio.run(_serve(spec, sign_run(key, spec.run.id, text), key, state, listen, announce, archive))


async def _serve(
    spec: RunSpec,
    signed: SignedRun,
    key: SigningKey,
    state: Path,
    listen: Sequence[str],
    announce: Sequence[str],
    archive: int,
) -> None:
    organiser = key.public
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    start = asyncio.create_task(
        Node.start(
            run_id=signed.run_id,
            organiser=organiser,
            host_maddrs=listen,
            announce_maddrs=announce,
            identity_path=state / "node.key",
        )
    )
    if not await _first(start, stop):
        return
    node = start.result()
    try:
        await node.publish_run(signed)
        maddrs = linkable(await node.maddrs(), node.peer_id, announce)
        link = str(JoinLink(signed.run_id, organiser, tuple(maddrs)))
        write_atomic(state / "join-link", link + "\n")
        click.echo(f"serving run {signed.run_id} as peer {node.peer_id}")
        click.echo(f"join link, also in {state / 'join-link'}:\n\n{link}\n")
        click.echo("on each machine that takes part: dilocox-peer join '<the link>'")
        if warning := reach_warning(maddrs):
            click.echo(f"warning: {warning}", err=True)
        with contextlib.closing(open_board(signed.run_id)) as board:
            keeping = asyncio.create_task(_keep(spec, signed, key, node, state / "archive", archive, board))
            try:
                await _watch(node, signed, board, stop)
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
    finally:
        # A service manager sends SIGTERM to p2pd as well: what breaks on its sockets now is no news.
        loop.set_exception_handler(lambda _loop, _context: None)
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await within(node.close(), _CLOSE_S)
    click.echo("stopped")


async def _keep(
    spec: RunSpec, signed: SignedRun, key: SigningKey, node: Node, directory: Path, archive: int, board: Board
) -> None:
    """Hold the archive until cancelled. Without states to keep it remembers how far the run has come."""
    try:
        layouts = await asyncio.to_thread(_layouts, spec) if archive else {}
        keeper = Archive(spec, signed, key, node, layouts, directory, archive, board.warn)
        await keeper.open()
    except (DilocoxError, OSError) as error:
        board.warn(f"no archive: {error}")
        return
    board.say(keeper.begins)
    try:
        while True:
            await keeper.look()
            await asyncio.sleep(_POLL_S)
    finally:
        await keeper.close()


def _layouts(spec: RunSpec) -> dict[int, Layout]:
    """What a round of each stage may send, at most."""
    from p2p_dilocox.traffic import model_tensors  # loads transformers; the link is out before

    tensors = model_tensors(spec)
    return {
        stage: Layout(shapes, spec.compression, dense_names=tensors.dense_names)
        for stage, shapes in tensors.stages.items()
    }


async def _watch(node: Node, signed: SignedRun, board: Board, stop: asyncio.Event) -> None:
    """Show the clusters and publish the spec again, well before it expires, until `stop`."""
    published = time.monotonic()
    while not stop.is_set():
        try:
            board.show(await node.clusters())
            if time.monotonic() - published > RUN_LIFE_S / 4:
                if await node.publish_run(signed):
                    published = time.monotonic()
                else:
                    board.warn("the run spec could not be stored again; trying on")
        except DilocoxError as error:
            board.warn(str(error))
        with contextlib.suppress(asyncio.TimeoutError):
            await within(stop.wait(), _POLL_S)


async def _first(task: "asyncio.Task[Node]", stop: asyncio.Event) -> bool:
    """Wait for the task, which may raise, or for `stop`, which cancels it. True if the task is done."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return True
    task.cancel()
    await asyncio.wait({task}, timeout=_CLOSE_S)
    return False
