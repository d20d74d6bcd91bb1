"""Every error that crosses a boundary, as one tree.

    TwostrokeError
    ├── InvalidRequest        the client's mistake; names the parameter
    │   └── NotFound          no such model
    ├── Unauthorized          missing or wrong API key, or cluster secret
    ├── Overloaded            no room now, try again
    ├── Unavailable           nobody is there to serve it
    ├── DeadlineExceeded      a budget ran out
    ├── Cancelled             the caller went away
    ├── IncompatiblePeer      two workers cannot exchange blocks
    ├── StaleTransfer         message for a transfer that is not (or no longer) live here
    ├── CorruptTransfer       checksum, count or range of a chunk is wrong
    └── Internal              ours
    ConfigError               bad flag or variable; ends the process with exit code 2

A class carries its HTTP status and its gRPC status name; `shared/wire/errors.py` and `services/router/http/errors.py` are the
only places that translate.
"""

from __future__ import annotations

from typing import ClassVar


class TwostrokeError(Exception):
    """Base of all errors that are shown to a client or a peer.

    `param` names the request field at fault, in the client's terms, where there is one.
    """

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    kind: ClassVar[str] = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TwostrokeError):
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    kind = "invalid_request_error"


class NotFound(InvalidRequest):
    http_status = 404
    grpc_status = "NOT_FOUND"
    kind = "not_found_error"


class Unauthorized(TwostrokeError):
    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    kind = "authentication_error"


class Overloaded(TwostrokeError):
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    kind = "overloaded_error"


class Unavailable(TwostrokeError):
    http_status = 503
    grpc_status = "UNAVAILABLE"
    kind = "unavailable_error"


class DeadlineExceeded(TwostrokeError):
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    kind = "timeout_error"


class Cancelled(TwostrokeError):
    http_status = 499
    grpc_status = "CANCELLED"
    kind = "cancelled_error"


class IncompatiblePeer(TwostrokeError):
    http_status = 503
    grpc_status = "FAILED_PRECONDITION"
    kind = "incompatible_peer_error"


class StaleTransfer(TwostrokeError):
    http_status = 503
    grpc_status = "ABORTED"
    kind = "stale_transfer_error"


class CorruptTransfer(TwostrokeError):
    http_status = 503
    grpc_status = "DATA_LOSS"
    kind = "corrupt_transfer_error"


class Internal(TwostrokeError):
    pass


class ConfigError(Exception):
    """A flag, variable or environment that cannot work. One line for the operator; exit code 2."""
