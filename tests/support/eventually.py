"""Waiting for what another thread or process does, where no event of it reaches the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Returns as soon as the condition holds; fails if it does not within the time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
