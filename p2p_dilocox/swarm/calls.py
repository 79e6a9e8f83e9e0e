"""Two faults of hivemind 1.1.12's connection to p2pd (ControlClient), worked around where it keeps its calls.

The reply to a call that was cancelled a moment ago ends the task that reads replies: from then on the peer
hears nothing and answers nothing, for ever, without a word (seen once in some hundred rounds of eight peers).
And a handler whose caller gives up stays in a table for ever.
"""

import asyncio
from typing import Any

from hivemind.p2p import P2P

__all__ = ["survive_cancelled_calls"]


def survive_cancelled_calls(p2p: P2P) -> None:
    """Call it once, before the first call."""
    control = p2p._client.control
    control._pending_calls = _OpenCalls(control._pending_calls)
    control._handler_tasks = _RunningHandlers(control._handler_tasks)


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
