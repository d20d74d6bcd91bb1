"""Server-sent events: a generation as a stream of JSON chunks.

1. Nothing is sent before the first chunk exists, so that a request which fails until then has the status of its error. Only when
   the first chunk takes long do headers and a comment go ahead: proxies give up on connections that say nothing.
2. Each step's chunks go out at once, in one write. A comment follows whenever nothing was written for a while.
3. `data: [DONE]` follows the last chunk. After a failure there is an event with the error instead, and no [DONE].
4. The client going away, at any time, cancels the generation. So does the request's deadline, also while a client that does not
   read holds up a write; the connection of such a client is aborted, because no error could be written to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.router.http.connection import while_wanted
from services.router.http.context import RequestContext
from services.router.http.errors import ClientGone, as_twostroke_error, error_body
from services.router.http.metrics import CLIENTS_STUCK
from shared.process.tasks import cancel_and_wait

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
FIRST_COMMENT_AFTER_S = 10.0
COMMENT_EVERY_S = 15.0


def event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], context: RequestContext) -> None:
        """`events` are whole events, one or several at a time, without [DONE]."""
        self._events = events
        self._context = context
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: nginx would collect events otherwise.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = _Out(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_wanted(self._context, receive, self._stream(out))
        except ClientGone:
            pass
        except Exception as error:
            if not out.has_begun:
                raise
            await self._fail(out, error)

    async def _stream(self, out: _Out) -> None:
        async with aclosing(self._events) as events, _comments(out):
            async for chunk in events:
                await out.write(chunk)
        await out.write(DONE, is_last=True)

    async def _fail(self, out: _Out, error: Exception) -> None:
        body = event(error_body(as_twostroke_error(error, self._context.request_id)))
        if self._context.connection.is_stuck:
            CLIENTS_STUCK.inc()
            self._context.connection.abort()
        else:
            await out.write(body, is_last=True)


class _Out:
    """The body of the answer. Whole events go in; the head goes out with the first."""

    def __init__(self, send: Send, head: dict[str, Any]) -> None:
        self._send = send
        self._head = head
        self._turn = asyncio.Lock()  # events and comments come from two tasks
        self.has_begun = False
        self.written_at = time.perf_counter()

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        async with self._turn:
            if not self.has_begun:
                await self._send(self._head)
                self.has_begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self.written_at = time.perf_counter()


@asynccontextmanager
async def _comments(out: _Out) -> AsyncIterator[None]:
    """Inside, a comment is written whenever nothing else was for a while."""
    task = asyncio.create_task(_write_comments(out))
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def _write_comments(out: _Out) -> None:
    while True:
        patience_s = COMMENT_EVERY_S if out.has_begun else FIRST_COMMENT_AFTER_S
        left_s = out.written_at + patience_s - time.perf_counter()
        if left_s > 0:
            await asyncio.sleep(left_s)
        else:
            await out.write(COMMENT)
