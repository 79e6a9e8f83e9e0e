"""Short visits to a swarm, as a client that nobody can dial: the run spec, and who is there.

hivemind is loaded here, which takes seconds: commands import this module when all else has been checked.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click

from p2p_dilocox.errors import UnreachableError
from p2p_dilocox.swarm.link import JoinLink
from p2p_dilocox.swarm.messages import Presence
from p2p_dilocox.swarm.node import Node
from p2p_dilocox.swarm.patience import within

__all__ = ["fetch_spec", "list_clusters"]

_VISIT_S = 30.0
_T = TypeVar("_T")


def fetch_spec(link: JoinLink) -> str:
    """The run's spec as text, signed by the organiser of the link.

    Raises UnreachableError, NotTrustedError, and SystemExit(128 + n) on SIGINT and SIGTERM.
    """

    async def fetch() -> str:
        async with _visitor(link) as node:
            return (await node.fetch_run()).verify(link.organiser)

    return asyncio.run(_until_signal(fetch(), "run spec"))


def list_clusters(link: JoinLink) -> dict[str, tuple[Presence, float]]:
    """The clusters of the run by id, and the seconds since each one's heartbeat. Raises as fetch_spec does.

    Whoever looks is a client of the DHT and tells no presence: nobody counts it as a cluster.
    """

    async def look() -> dict[str, tuple[Presence, float]]:
        async with _visitor(link) as node:
            return await node.sightings()

    return asyncio.run(_until_signal(look(), "list of clusters"))


@asynccontextmanager
async def _visitor(link: JoinLink) -> AsyncIterator[Node]:
    node = await Node.start(
        run_id=link.run_id, organiser=link.organiser, initial_peers=link.peers, client_mode=True
    )
    for address, why in node.unreachable.items():
        click.echo(f"warning: {address}: {why}", err=True)
    try:
        yield node
    finally:
        await node.close()


async def _until_signal(body: Coroutine[Any, Any, _T], wanted: str) -> _T:
    """`body` within its time, or cancelled by a signal. What it raises then says nothing: what it was waiting
    for is torn down around it.
    """
    task, got = asyncio.current_task(), list[int]()

    def stop(number: int) -> None:
        got.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await within(body, _VISIT_S)
    except BaseException as error:
        if got:
            raise SystemExit(128 + got[0]) from None
        if isinstance(error, TimeoutError):
            raise UnreachableError(
                f"no {wanted} from the peers of the link within {_VISIT_S:.0f} s."
            ) from error
        raise
