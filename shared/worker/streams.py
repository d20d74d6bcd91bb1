"""From the engine's thread to the coroutine that serves a request: one mailbox per request, one wake-up of the loop per step.

A mailbox holds what the engine has said about a request and what the coroutine has not taken yet. The coroutine takes all of it at
once, so while gRPC's flow control holds a message back, the next one grows. What a reader leaves too long is bounded: a mailbox
that is full closes, the engine's work for it ends, and the coroutine, when it comes to take more, gets an error that makes the
router continue the request later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from shared.base.errors import InvalidRequest, Overloaded
from shared.base.request import Output
from shared.engine.schedule.plan import Event

MAX_UNREAD_SIZE = 4096  # tokens, with each of their top logprobs counted as one more


class Mailbox:
    def __init__(self, on_full: Callable[[], object]) -> None:
        self._on_full = on_full
        self._events: list[Event] = []
        self._size = 0
        self._is_full = False
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        if self._is_full:
            return
        self._events.append(event)
        if isinstance(event, Output):
            self._size += sum(1 + len(token.top_logprobs) for token in event.tokens)
        self._news.set()
        if self._size > MAX_UNREAD_SIZE:
            self._is_full = True
            self._on_full()

    async def take(self) -> list[Event]:
        """All that has come since the last call, in order; waits for the first. Raises Overloaded after the last event of a
        mailbox that has been full."""
        await self._news.wait()
        if self._is_full and not self._events:
            raise Overloaded("the reader of this stream is too slow; continue it when it has caught up")
        taken, self._events, self._size = self._events, [], 0
        if not self._is_full:
            self._news.clear()
        return taken


class Streams:
    """Events of requests without a mailbox are dropped: their abort is already under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._mailboxes: dict[str, Mailbox] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, request_id: str, on_full: Callable[[], object] = lambda: None) -> Mailbox:
        """`on_full` is called, on the loop, if the reader leaves too much in the mailbox."""
        if request_id in self._mailboxes:
            raise InvalidRequest(f"request_id {request_id!r} is in use", param="request_id")
        self._idle.clear()
        mailbox = self._mailboxes[request_id] = Mailbox(on_full)
        return mailbox

    def close(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        if not self._mailboxes:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    def post(self, events: Sequence[Event]) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self.deliver, events)

    def deliver(self, events: Sequence[Event]) -> None:
        """On the loop's own thread."""
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)
