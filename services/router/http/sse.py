"""Server-sent events: a generation as a stream of JSON chunks.

1. Nothing is sent before the first chunk exists, so that a request which fails until then has the status of its error.
2. Each step's chunks go out at once, in one write.
3. `data: [DONE]` follows the last chunk. After a failure there is an event with the error instead, and no [DONE].
4. The client going away, at any time, cancels the generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.router.http.connection import while_connected
from services.router.http.errors import ClientGone, as_twostroke_error, error_body

DONE = b"data: [DONE]\n\n"


def event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        """`events` are whole events, one or several at a time, without [DONE]; at least one."""
        self._events = events
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: nginx would collect events otherwise.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = DONE
            except Exception as error:
                last = event(error_body(as_twostroke_error(error)))
        await send({"type": "http.response.body", "body": last, "more_body": False})
