"""How a server stops: it takes requests, then only finishes those that it has, then ends what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.base.errors import Unavailable


class ServerStopping(Unavailable):
    """This server is about to end; another one may answer."""


class Stopping:
    def __init__(self) -> None:
        self.is_draining = False  # no request is taken any more
        self.over = asyncio.Event()  # requests that still run end now, with an error
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a request that draining waits for."""
        self._num_running += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._is_idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Takes no requests from now on; returns when those that run have ended, at the latest after `timeout_s`, when what is
        left ends with an error."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            pass
        self.end()

    def end(self) -> None:
        """Without waiting for anything."""
        self.is_draining = True
        self.over.set()
