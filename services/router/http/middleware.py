"""What happens to every request before and after its endpoint: it is counted, its key is checked, and generation is bounded.

Plain ASGI, so that a request is accounted for until the last byte of its stream.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.http.errors import error_response
from services.router.http.metrics import HTTP_REQUEST_SECONDS, HTTP_REQUESTS, REQUESTS_IN_FLIGHT, REQUESTS_REFUSED
from shared.base.errors import Cancelled, Overloaded, Unauthorized


class Measure:
    """Counts requests by path and status, and takes their time. Paths outside `known_paths` count as "other"."""

    def __init__(self, app: ASGIApp, known_paths: Collection[str]) -> None:
        self._app = app
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_s = time.perf_counter()
        status = Cancelled.http_status  # if nothing is ever sent, the client went away

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            status = 500
            raise
        finally:
            endpoint = scope["path"] if scope["path"] in self._known_paths else "other"
            HTTP_REQUESTS.labels(endpoint, status).inc()
            HTTP_REQUEST_SECONDS.labels(endpoint).observe(time.perf_counter() - started_s)


class CheckKey:
    """Asks for one of `keys` as a bearer token, on all but the `open_paths`. Without keys, everybody may."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in self._open_paths or self._has_key(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        await error_response(Unauthorized("the API key is missing or wrong"))(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given_key = given.strip().encode("latin-1")  # the bytes that were sent
        matches = [hmac.compare_digest(given_key, key) for key in self._keys]  # all of them: time must not tell which
        return scheme.lower() == "bearer" and any(matches)


class BoundConcurrency:
    """At most `limit` requests to `paths` at a time; the next one is told to come back."""

    def __init__(self, app: ASGIApp, paths: Collection[str], limit: int) -> None:
        self._app = app
        self._paths = paths
        self._limit = limit
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        if self._num_in_flight >= self._limit:
            REQUESTS_REFUSED.inc()
            error = Overloaded(f"the server is answering {self._limit} requests, as many as it takes; try again")
            return await error_response(error)(scope, receive, send)
        self._num_in_flight += 1
        REQUESTS_IN_FLIGHT.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_in_flight -= 1
            REQUESTS_IN_FLIGHT.dec()
