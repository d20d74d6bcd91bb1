"""From the engine's thread to the coroutine that serves a request: one queue per request, one wake-up of the loop per step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from shared.base.errors import InvalidRequest


class Addressed(Protocol):
    @property
    def request_id(self) -> str: ...


E = TypeVar("E", bound=Addressed)


class Streams(Generic[E]):
    """Events of requests that nobody listens to (any more) are dropped: their abort is already under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[str, asyncio.Queue[E]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, request_id: str) -> asyncio.Queue[E]:
        if request_id in self._queues:
            raise InvalidRequest(f"request_id {request_id!r} is in use", param="request_id")
        self._idle.clear()
        return self._queues.setdefault(request_id, asyncio.Queue())

    def close(self, request_id: str) -> None:
        self._queues.pop(request_id, None)
        if not self._queues:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def post(self, events: Sequence[E]) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self.deliver, events)

    def deliver(self, events: Sequence[E]) -> None:
        """On the loop's own thread."""
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)
