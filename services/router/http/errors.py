"""Errors as HTTP shows them: OpenAI's shape, the right status, and never a traceback.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.router.http.json_response import json_response
from services.router.http.metrics import CLIENT_DISCONNECTS
from shared.base.errors import Cancelled, Internal, InvalidRequest, NotFound, Overloaded, TwostrokeError, Unauthorized, Unavailable

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens do not fit into the model's context."""


class PayloadTooLarge(InvalidRequest):
    http_status = 413


class BodyTimeout(InvalidRequest):
    """The client is too slow in sending its body."""

    http_status = 408


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


def error_body(error: TwostrokeError) -> dict[str, Any]:
    return _body(error.message, error.kind, error.param, _CODES.get(type(error)))


def error_response(error: TwostrokeError) -> Response:
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), error.http_status, headers)


def as_twostroke_error(error: Exception) -> TwostrokeError:
    """The error itself, or Internal for one that nobody foresaw; that one is logged, and only its log has the details."""
    if isinstance(error, TwostrokeError):
        return error
    log.error("request failed", exc_info=error)
    return Internal("the server failed to answer this request; its log says why")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TwostrokeError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unforeseen)


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


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    return error_response(Internal("the server failed to answer this request; its log says why"))
