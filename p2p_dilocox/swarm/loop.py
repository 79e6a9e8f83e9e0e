"""An event loop in a thread of its own: where a rank talks to other peers while its main thread trains."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2p_dilocox.swarm.patience import within

__all__ = ["NetworkThread"]

_T = TypeVar("_T")


class NetworkThread:
    """Runs until `close`. p2pd is started from here and dies with
    this thread, so it must live as long as the node."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._thread.start()

    def call(self, body: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Run `body` in the loop and wait for its result. Raises
        TimeoutError, after cancelling it, if it takes longer."""
        future = asyncio.run_coroutine_threadsafe(within(body, timeout_s), self.loop)
        return future.result(timeout_s + 5.0)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
