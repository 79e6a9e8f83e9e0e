"""Waiting with a limit."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

_T = TypeVar("_T")


async def within(body: Awaitable[_T], seconds: float) -> _T:
    """The result of `body`; TimeoutError, after cancelling it, if it takes longer.

    asyncio.wait_for of Python 3.11 returns the result and forgets that it was cancelled if both come at once:
    a task that was told to end then goes on (measured: a round that never ended). asyncio.timeout does not.
    """
    async with asyncio.timeout(seconds):
        return await body
