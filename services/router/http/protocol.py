"""One client's connection: uvicorn's HTTP protocol, within bounds that hold before any key is checked.

    connect ──> head ──> body ──> answer ──> idle ──> head …
       │          │        │         │         └ closed after the keep-alive timeout
       │          │        │         └ aborted if what was written is not read in time
       │          │        └ bounded where it is read (limits.py)
       │          └ bounded in bytes (431, 414), lines (431) and time (408); what is not HTTP gets 400
       └ one too many gets 503

A refusal is the last thing that a connection says: what the client still sends is dropped for a moment, because closing at once
would reset the connection and could take the answer with it.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.router.http.errors import (
    HeadTimeout,
    HeadTooLarge,
    MalformedRequest,
    TooManyConnections,
    UriTooLong,
    count_refusal,
    error_body,
)
from services.router.http.metrics import CLIENTS_STUCK
from shared.base.errors import TwostrokeError

CONNECTION_KEY = "twostroke.connection"  # in the ASGI scope

_MAX_UNSENT_BYTES = 64 * 1024  # that the system holds for a client, beside what is on its way


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    write_timeout_s: float  # for a client to read the rest of an answer that is complete
    head_timeout_s: float = 20.0  # for a head, from its first byte on
    linger_s: float = 2.0  # for a client to read why it was refused
    max_head_bytes: int = 64 * 1024
    max_uri_bytes: int = 8 * 1024
    max_header_lines: int = 100
    max_pipelined: int = 32  # requests sent ahead of the answer under way


class BoundedHttp(HttpToolsProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._answering: RequestResponseCycle | None = None  # self.cycle is the newest request, which may have to wait for it
        self._is_in_head = False
        self._num_parsed_bytes = 0  # of the head
        self._num_waiting_bytes = 0  # received for a head that they did not complete
        self._is_deaf = False  # to what the client may still send
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # What the application may ask of its connection

    @property
    def is_stuck(self) -> bool:
        return self.flow.write_paused

    def abort(self) -> None:
        self._is_deaf = True
        self._disconnect_requests()
        self.transport.abort()

    # The transport's events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _set_up_writing(transport)
        if len(self.connections) > self._limits.max_connections:
            limit = self._limits.max_connections
            return self._refuse(TooManyConnections(f"the server has {limit} connections, as many as it takes; try again"))
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnect_requests()
        for timer in (self._head_timer, self._write_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        was_in_head = self._is_in_head
        try:
            self.parser.feed_data(data)
            if was_in_head and self._is_in_head:  # the parser says nothing of a header line before it is complete
                self._num_waiting_bytes += len(data)
                self._check_head()
        except httptools.HttpParserUpgrade:  # this server speaks HTTP only: it answers, and drops what follows
            self._is_deaf = True
            self.cycle.keep_alive = False
        except TwostrokeError as error:
            return self._refuse(error)
        except httptools.HttpParserError as error:
            cause = error.__context__
            return self._refuse(cause if isinstance(cause, TwostrokeError) else MalformedRequest("this is not valid HTTP"))
        if self._head_timer is None and not self._is_busy():
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._on_head_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_write_timer()

    # The parser's events

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION_KEY] = self  # type: ignore[literal-required]
        self._is_in_head = True
        self._num_parsed_bytes = self._num_waiting_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_uri_bytes:
            raise UriTooLong(f"the request's path is too long; at most {self._limits.max_uri_bytes} bytes are allowed")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._limits.max_header_lines:
            raise HeadTooLarge(f"the request has too many header lines; at most {self._limits.max_header_lines} are allowed")
        self._num_parsed_bytes += len(name) + len(value) + len(": \r\n")
        self._check_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise MalformedRequest(f"more than {self._limits.max_pipelined} requests were sent ahead of their answers")
        super().on_headers_complete()
        self.flow.resume_reading()  # else a client that leaves with requests waiting would not be noticed

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if not self.flow.write_paused:
            self._cancel_write_timer()
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._write_timer is None and self.transport.get_write_buffer_size() > 0:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self._on_write_timeout)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self._on_write_timeout()
        else:
            super().timeout_keep_alive_handler()

    # Refusals

    def _is_busy(self) -> bool:
        """A request is being received or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _check_head(self) -> None:
        limit = self._limits.max_head_bytes
        if max(self._num_parsed_bytes, self._num_waiting_bytes) > limit:
            raise HeadTooLarge(f"the request's headers are too large; at most {limit} bytes are allowed")

    def _on_head_timeout(self) -> None:
        if self._is_in_head and not self._is_busy():
            self._refuse(HeadTimeout(f"the request's headers did not arrive within {self._limits.head_timeout_s:g} s"))
        else:  # the rest of a body that was answered without being read, or no HTTP at all
            self.abort()

    def _on_write_timeout(self) -> None:
        CLIENTS_STUCK.inc()
        self.abort()

    def _refuse(self, error: TwostrokeError) -> None:
        count_refusal(error)
        self._is_deaf = True
        if self.transport.is_closing():
            return
        if self.pipeline or (self._is_busy() and self.cycle.response_started):
            return self.abort()  # an answer is under way; another cannot be put into it
        self._disconnect_requests()
        self.transport.write(_refusal(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(self._limits.linger_s, self.transport.abort)

    def _disconnect_requests(self) -> None:
        """Tells all requests of this connection that their client is gone."""
        cycles = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        if self._answering is not None:
            cycles.append(self._answering)
        for cycle in cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _set_up_writing(transport: asyncio.Transport) -> None:
    accepted = transport.get_extra_info("socket")
    if accepted is None or accepted.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # Else the second small write, such as a first token behind its head, waits until the client has acknowledged the one before:
    # 40 ms. asyncio sees to it only where the listener was made for TCP by name.
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Else the system takes megabytes for a client that does not read, and its generation goes on.
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)


def _refusal(error: TwostrokeError) -> bytes:
    body = orjson.dumps(error_body(error))
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\nx-request-id: {uuid4().hex}\r\n\r\n"
    )
    return STATUS_LINE[error.http_status] + head.encode() + body
