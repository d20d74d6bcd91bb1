"""The HTTP server around the application: uvicorn with bounded connections, and a stop that lets streams finish.

serving ── first signal ──> draining: 503 for what is new, streams go on ── all ended, or the time is up ──> the end
                                 └────────────────────── second signal ─────────────────────────────────────────^
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from services.router.config import RouterConfig
from services.router.http.context import Connection
from services.router.http.protocol import BoundedHttp, ConnectionLimits
from services.router.http.stopping import Stopping

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1  # for the errors of streams that were ended


class HttpServer:
    def __init__(self, app: ASGIApp, config: RouterConfig, stopping: Stopping) -> None:
        self._stopping = stopping
        self._drain_timeout_s = config.drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._server = _Uvicorn(_uvicorn_config(app, config))

    async def serve(self, listener: socket.socket) -> None:
        """Until it has been stopped."""
        await self._server.serve(sockets=[listener])

    @property
    def connections(self) -> Collection[Connection]:
        return self._server.server_state.connections  # type: ignore[return-value]  # all are BoundedHttp

    def stop(self) -> None:
        """Lets requests finish that have begun; called again, ends them at once."""
        if self._draining is None:
            log.info("stopping; requests have %g s to finish", self._drain_timeout_s)
            self._draining = asyncio.create_task(self._drain())
        else:
            self._stopping.end()

    async def _drain(self) -> None:
        await self._stopping.drain(self._drain_timeout_s)
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair."""
        yield


def raise_file_limit() -> None:
    """As many open sockets as the system lets this process have; the usual limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _uvicorn_config(app: ASGIApp, config: RouterConfig) -> uvicorn.Config:
    limits = ConnectionLimits(max_connections=config.max_connections, write_timeout_s=config.request_timeout_s)
    return uvicorn.Config(
        app,
        http=partial(BoundedHttp, limits=limits),  # type: ignore[arg-type]  # it is only ever called
        ws="none",
        log_config=None,
        access_log=False,
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        timeout_keep_alive=config.keep_alive_timeout_s,  # type: ignore[arg-type]  # seconds, also parts of them
        timeout_graceful_shutdown=_LAST_WORDS_S,
        server_header=False,
    )
