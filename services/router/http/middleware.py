"""What happens to every request before and after its endpoint.

    Begin            gives it an id and a deadline, and answers for what fails unforeseen
    Measure          counts it, and takes its time
    RefuseWhenStopping
    CheckOrigin      keeps foreign web pages from a server without keys
    CheckKey
    BoundConcurrency

Plain ASGI, so that a request is accounted for until the last byte of its stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.router.http.context import RequestContext, begin, context_of, request_id_from
from services.router.http.errors import ForeignOrigin, as_twostroke_error, error_response
from services.router.http.metrics import HTTP_REQUEST_SECONDS, HTTP_REQUESTS, REQUESTS_IN_FLIGHT
from services.router.http.protocol import CONNECTION_KEY
from services.router.http.stopping import ServerStopping, Stopping
from shared.base.errors import Cancelled, Overloaded, Unauthorized

_DISCARD_TIMEOUT_S = 2.0


class Begin:
    """Makes the request's context. Its id goes out with every answer."""

    def __init__(self, app: ASGIApp, timeout_s: float, stopping: Stopping) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id, is_given = request_id_from(Headers(scope=scope).get("x-request-id", ""))
        context = RequestContext(request_id, is_given, time.perf_counter(), self._timeout_s, self._stopping, scope[CONNECTION_KEY])
        begin(scope, context)
        has_begun = False

        async def add_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, add_id)
        except Exception as error:
            failure = as_twostroke_error(error, request_id)
            if has_begun:
                context.connection.abort()
            else:
                await error_response(failure)(scope, receive, add_id)


class Measure:
    """Counts requests by path and status, and takes their time. Paths outside `known_paths` count as "other"."""

    def __init__(self, app: ASGIApp, known_paths: Collection[str]) -> None:
        self._app = app
        self._known_paths = known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
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
            HTTP_REQUEST_SECONDS.labels(endpoint).observe(time.perf_counter() - context_of(scope).arrived_at)


class RefuseWhenStopping:
    """A server that stops takes no more requests, but on the `open_paths`, and waits for those that it has taken."""

    def __init__(self, app: ASGIApp, stopping: Stopping, open_paths: Collection[str]) -> None:
        self._app = app
        self._stopping = stopping
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        if self._stopping.is_draining:
            await _discard_body(receive)
            return await error_response(ServerStopping("the server stops and takes no requests"))(scope, receive, send)
        with self._stopping.running():
            await self._app(scope, receive, send)


async def _discard_body(receive: Receive) -> None:
    """So that closing the connection after the answer does not reset it, which could take the answer with it."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            while (await receive()).get("more_body", False):
                pass


class CheckOrigin:
    """Keeps web pages of other origins from a server without keys, also those whose name resolves to this machine.

    Browsers send `Origin` with all that a page may not do unasked. A page that people open from this machine has the name
    localhost or an address; any other must be among `allowed`.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = Headers(scope=scope).get("origin", "")
            if origin not in self._allowed and "*" not in self._allowed and _is_foreign(origin):
                error = ForeignOrigin(f"pages of {origin[:100]!r} may not use this server; --allowed-origins allows them")
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


def _is_foreign(origin: str) -> bool:
    try:
        url = urlsplit(origin)
        name = url.hostname or ""
    except ValueError:
        return True
    if url.scheme not in ("http", "https") or name == "localhost" or name.endswith(".localhost"):
        return False  # without an origin, of an application on this machine, or of this machine
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


class CheckKey:
    """Asks for one of `keys` as a bearer token, on all but the `open_paths`. Without keys, everybody may."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._tenants = {key.encode(): _tenant_of(key) for key in keys}
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._tenants or scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        tenant = self._find_tenant(Headers(scope=scope))
        if tenant is None:
            return await error_response(Unauthorized("the API key is missing or wrong"))(scope, receive, send)
        begin(scope, replace(context_of(scope), tenant=tenant))
        await self._app(scope, receive, send)

    def _find_tenant(self, headers: Headers) -> str | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given_key = given.strip().encode("latin-1")  # the bytes that were sent
        # All of them are compared: time must not tell which.
        found = [tenant for key, tenant in self._tenants.items() if hmac.compare_digest(given_key, key)]
        return found[0] if found and scheme.lower() == "bearer" else None


def _tenant_of(key: str) -> str:
    """Names whose key it is without giving the key away."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"twostroke tenant").hexdigest()


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
            error = Overloaded(f"the server is answering {self._limit} requests, as many as it takes; try again")
            return await error_response(error)(scope, receive, send)
        self._num_in_flight += 1
        REQUESTS_IN_FLIGHT.inc()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_in_flight -= 1
            REQUESTS_IN_FLIGHT.dec()
