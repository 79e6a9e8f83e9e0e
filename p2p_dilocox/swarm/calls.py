"""Three faults of hivemind 1.1.12's connection to p2pd (ControlClient), worked around in its tables.

The reply to a call that was cancelled a moment ago ends the task that reads replies: from then on the peer
hears nothing and answers nothing, for ever, without a word (seen once in some hundred rounds of eight peers).
A handler whose caller gives up stays in a table for ever. And a request that fails, or is given up, leaves
its socket to p2pd open until the garbage collector comes, which may be after the end of the loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from hivemind.p2p import P2P

__all__ = ["survive_cancelled_calls"]

_opened: ContextVar[asyncio.StreamWriter | None] = ContextVar("_opened", default=None)


def survive_cancelled_calls(p2p: P2P) -> None:
    """Call it once, before the first call."""
    control = p2p._client.control
    control._pending_calls = _OpenCalls(control._pending_calls)
    control._handler_tasks = _RunningHandlers(control._handler_tasks)
    connector = control.daemon_connector
    connector.open_connection = _noting(connector.open_connection)
    for name in ("identify", "connect", "list_peers", "disconnect", "stream_open"):
        setattr(control, name, _closing(getattr(control, name)))


def _noting(open_connection: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    async def opened() -> Any:
        reader, writer = await open_connection()
        _opened.set(writer)
        return reader, writer

    return opened


def _closing(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A request to p2pd has a connection of its own."""

    async def requested(*args: Any, **_options: Any) -> Any:
        _opened.set(None)
        try:
            return await request(*args, **_options)
        except BaseException:
            writer = _opened.get()
            if writer is not None:
                writer.close()
            raise
        finally:
            _opened.set(None)

    return requested


class _OpenCalls(dict[Any, "asyncio.Future[Any]"]):
    """A call that nobody waits for any more is not in it, so that its reply is passed over."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


class _RunningHandlers(dict[Any, "asyncio.Task[Any]"]):
    """A handler that has ended, in whatever way, is not in it."""

    def __setitem__(self, call: Any, task: "asyncio.Task[Any]") -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda _: self.pop(call, None))
