"""Signs of life in the streams to a router: something at least every half second, sent by this process's own event loop.

A router takes silence for a loop that is stuck, and serves the request elsewhere. While a stream has something to say, that is
sign enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

HEARTBEAT_S = 0.5

T = TypeVar("T")


async def or_heartbeat(wait: Callable[[], Awaitable[T]]) -> T | None:
    """What `wait` returns; None, and `wait` is cancelled, when a heartbeat is due before."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await wait()
    except TimeoutError:
        return None


async def heartbeats_until(work: asyncio.Task[Any]) -> AsyncIterator[None]:
    """One for each heartbeat that is due until `work` has ended, whatever it ended with."""
    while not (await asyncio.wait({work}, timeout=HEARTBEAT_S))[0]:
        yield None
