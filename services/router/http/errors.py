"""Errors as HTTP shows them: OpenAI's shape, the right status, and never a traceback.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.router.http.json_response import json_response
from services.router.http.metrics import CLIENT_DISCONNECTS, REQUESTS_REFUSED
from services.router.http.stopping import ServerStopping
from shared.base.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    TwostrokeError,
    Unauthorized,
    Unavailable,
)

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens do not fit into the model's context."""


class PayloadTooLarge(InvalidRequest):
    http_status = 413


class BodyTimeout(InvalidRequest):
    """The client is too slow in sending its body."""

    http_status = 408


class HeadTimeout(InvalidRequest):
    """The client is too slow in sending its request line and headers."""

    http_status = 408


class UriTooLong(InvalidRequest):
    http_status = 414


class HeadTooLarge(InvalidRequest):
    http_status = 431


class MalformedRequest(InvalidRequest):
    """Not HTTP."""


class UnsupportedMediaType(InvalidRequest):
    http_status = 415


class ForeignOrigin(InvalidRequest):
    """A web page that may not use this server."""

    http_status = 403


class TooManyConnections(Unavailable):
    pass


class ClientGone(Cancelled):
    """The client closed its connection; nobody reads the answer."""


# What programs compare; the kind of an error is its class's `kind`.
_CODES: dict[type[TwostrokeError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    PayloadTooLarge: "request_too_large",
    NotFound: "model_not_found",
    Unauthorized: "invalid_api_key",
    Overloaded: "rate_limit_exceeded",
}

# What refused requests are counted as; the first class that fits.
_REFUSALS: dict[type[TwostrokeError], str] = {
    MalformedRequest: "malformed",
    HeadTooLarge: "head_too_large",
    UriTooLong: "uri_too_long",
    HeadTimeout: "head_timeout",
    TooManyConnections: "connections",
    ServerStopping: "stopping",
    PayloadTooLarge: "body_too_large",
    BodyTimeout: "body_timeout",
    UnsupportedMediaType: "content_type",
    ForeignOrigin: "origin",
    Unauthorized: "key",
    NotFound: "model",
    ContextLengthExceeded: "context_length",
    Overloaded: "concurrency",
    InvalidRequest: "invalid",
}


# An address, a URL or a path in a message: those of this side of the router are not the client's business.
_INTERNAL = re.compile(r"\d+\.\d+\.\d+\.\d+|\[?[0-9a-f]*:[0-9a-f:]*:[0-9a-f]*\]?|[\w.-]+:\d{2,5}\b|\w+://|(?<!\w)/\w+/|\bipv[46]:")


def public_message(error: TwostrokeError) -> str:
    """What a client may read. A refusal of the client's own request is shown as it is; of a failure behind the router, the text is
    shown unless it names something internal, which the log has then."""
    if isinstance(error, InvalidRequest) or not _INTERNAL.search(error.message):
        return error.message
    log.warning("%s: %s", error.kind, error.message)
    return _PUBLIC.get(type(error), "the server failed to answer this request; its log says why")


_PUBLIC: dict[type[TwostrokeError], str] = {
    Unavailable: "no worker can serve this request now; try again",
    Overloaded: "no worker has room for this request now; try again",
    DeadlineExceeded: "the request took too long",
}


def error_body(error: TwostrokeError) -> dict[str, Any]:
    return _body(public_message(error), error.kind, error.param, _CODES.get(type(error)))


def error_response(error: TwostrokeError) -> Response:
    """The answer to a request that is refused or has failed before anything was sent."""
    count_refusal(error)
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, ServerStopping | TooManyConnections):
        headers["Connection"] = "close"
    return json_response(error_body(error), error.http_status, headers)


def count_refusal(error: TwostrokeError) -> None:
    reason = next((reason for kind, reason in _REFUSALS.items() if isinstance(error, kind)), None)
    if reason is not None:
        REQUESTS_REFUSED.labels(reason).inc()


def as_twostroke_error(error: Exception, request_id: str) -> TwostrokeError:
    """The error itself, or Internal for an unforeseen one; that one is logged, and only its log has the details."""
    if isinstance(error, TwostrokeError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return Internal("the server failed to answer this request; its log says why")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TwostrokeError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TwostrokeError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """No such path, or the wrong method for it."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        body = _body(f"there is no {where}", NotFound.kind, None, "unknown_url")
    elif error.status_code == 405:
        body = _body(f"{where} is not allowed", InvalidRequest.kind, None, "method_not_allowed")
    else:
        body = _body(str(error.detail), InvalidRequest.kind, None, None)
    return json_response(body, error.status_code, error.headers)


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    CLIENT_DISCONNECTS.inc()
    return error_response(ClientGone("the client went away while it sent its request"))
