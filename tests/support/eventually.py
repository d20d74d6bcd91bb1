"""Waiting for what another thread or process does, where no event of it reaches the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.01


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = _TIMEOUT_S) -> None:
    """Returns when `condition` holds. For state in another process, that tells nobody when it changes."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = condition()
        if outcome if isinstance(outcome, bool) else await outcome:
            return
        assert time.monotonic() < deadline, f"still not so after {timeout_s} s"
        await asyncio.sleep(_LOOK_AGAIN_S)
