"""GET /health, /ready and /metrics: for those who run the router."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.router.http.catalog import Catalog
from services.router.http.errors import error_response
from services.router.http.json_response import json_response
from services.router.http.stopping import Stopping
from shared.base.errors import Unavailable


class Probes:
    def __init__(self, catalog: Catalog, stopping: Stopping) -> None:
        self._catalog = catalog
        self._stopping = stopping

    async def health(self, http: Request) -> Response:
        """The process is alive. Says nothing about workers: a router without them must not be restarted."""
        return json_response({"status": "ok"})

    async def ready(self, http: Request) -> Response:
        """A request would succeed now; if not, 503 and why."""
        if self._stopping.is_draining:
            return error_response(Unavailable("the router stops"))
        reason = self._catalog.why_not_ready()
        return json_response({"status": "ready"}) if reason is None else error_response(Unavailable(reason))

    async def metrics(self, http: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
