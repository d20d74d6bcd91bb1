"""One HTTP/1.1 request over a connection of its own, for a client that shares its cores with the server it measures.

    connect ─> send ─> status ─> body, piece by piece as it arrives ─> end of the answer ─> close

Nothing is read ahead, copied through a stream or handed to another task: the body's bytes go to `on_body` inside the callback of
the event loop that received them. A connection per request, since not every engine's survives a streamed answer.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson

from shared.base.errors import ConfigError

_HTTP_OK = 200
_MAX_ERROR_CHARS = 200


class HttpFailure(Exception):
    """An answer other than 200, or none at all."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is. `base_path` goes ahead of every path and has no slash at its end."""

    host: str
    port: int
    is_tls: bool
    base_path: str
    api_key: str

    @classmethod
    def parse(cls, url: str, api_key: str) -> Endpoint:
        """From http://host:port, with or without the /v1 that OpenAI's clients want. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; it must look like http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        base_path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base_path, api_key)

    def request(self, method: str, path: str, body: bytes) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "\r\n"]).encode() + body


async def exchange(endpoint: Endpoint, method: str, path: str, body: bytes, on_body: Callable[[bytes], None]) -> None:
    """Returns at the end of a 200's body. Raises HttpFailure, whose words are for the user. Cancelling it closes the connection,
    which is how a client goes away."""
    loop = asyncio.get_running_loop()
    request = endpoint.request(method, path, body)
    try:
        transport, protocol = await loop.create_connection(
            lambda: _Exchange(request, on_body),
            endpoint.host,
            endpoint.port,
            ssl=ssl.create_default_context() if endpoint.is_tls else None,
        )
    except OSError as error:
        raise HttpFailure(f"cannot connect to {endpoint.host}:{endpoint.port}: {error.strerror or error}") from None
    try:
        await protocol.ended
    finally:
        transport.close()
    if protocol.status != _HTTP_OK:
        raise HttpFailure(f"HTTP {protocol.status}: {_readable(bytes(protocol.error_body))}")


def error_message(body: object) -> str:
    """What an error in OpenAI's shape, or in another, says."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_MAX_ERROR_CHARS]


def _readable(body: bytes) -> str:
    try:
        return error_message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return " ".join(body.decode(errors="replace").split())[:_MAX_ERROR_CHARS] or "no reason given"


class _Exchange(asyncio.Protocol):
    """httptools calls the methods named on_… from within feed_data."""

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.error_body = bytearray()
        self._request = request
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._ends_with_connection = True  # unless a header says where the body ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._end(HttpFailure(f"not an answer that can be read: {cause or error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self.status and self._ends_with_connection:
            self._end(None)
        self._end(HttpFailure(f"the server closed the connection before the end of its answer{f' ({exc})' if exc else ''}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == _HTTP_OK:
            self._on_body(body)
        else:
            self.error_body += body

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, failure: HttpFailure | None) -> None:
        if self.ended.done():
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)
