"""The outputs of a generation on their way to its reader: at most so many wait, and who adds one
more waits with it."""

from __future__ import annotations

import asyncio
from collections import deque

from shared.base.errors import TwostrokeError
from shared.base.request import Output


class OutputQueue:
    """Many writers, one reader. However it ends, the reader is told; nobody waits for ever after `end`."""

    def __init__(self, max_waiting: int) -> None:
        self._waiting: deque[Output] = deque()
        self._room = asyncio.Semaphore(max_waiting)
        self._news = asyncio.Event()
        self._has_ended = False
        self._error: TwostrokeError | None = None

    async def put(self, output: Output) -> None:
        """Waits while the reader has enough to read."""
        await self._room.acquire()
        self._waiting.append(output)
        self._news.set()

    def end(self, error: TwostrokeError | None) -> None:
        """No more comes: after what waits, `get` raises the error, or says that this is all. The first end counts."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._news.set()

    def discard(self) -> None:
        """The reader wants nothing of what waits."""
        self._waiting.clear()

    async def get(self) -> Output | None:
        """None: that was all. Raises the error that the outputs ended with, each time anew."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return None
            self._news.clear()
            await self._news.wait()
        self._room.release()
        return self._waiting.popleft()
