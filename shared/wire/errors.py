"""The one translation between our errors and gRPC statuses, so that an error keeps its type from leg to leg."""

from __future__ import annotations

import grpc

from shared.base import errors
from shared.base.errors import TwostrokeError

_PARAM_KEY = "twostroke-param"
_BROKEN_WRITE = "Internal error from Core"  # grpc.aio's own words

_BY_STATUS: dict[str, type[TwostrokeError]] = {
    cls.grpc_status: cls
    for cls in (
        errors.InvalidRequest,
        errors.NotFound,
        errors.Unauthorized,
        errors.Overloaded,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.IncompatiblePeer,
        errors.StaleTransfer,
        errors.CorruptTransfer,
        errors.Internal,
    )
}


def status_of(error: TwostrokeError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(code, details, trailing metadata) for a servicer to abort with."""
    trailing = ((_PARAM_KEY, error.param),) if error.param else ()
    return grpc.StatusCode[error.grpc_status], error.message, trailing


def is_broken_write(error: grpc.RpcError) -> bool:
    """Whether this side wrote to a call that the peer had just ended. Sometimes grpc.aio gives this as the call's status, and the
    peer's is lost."""
    return error.code() is grpc.StatusCode.INTERNAL and error.details() == _BROKEN_WRITE


def from_rpc_error(error: grpc.RpcError) -> TwostrokeError:
    """The error a peer raised, or the one that describes how the call itself failed."""
    if is_broken_write(error):
        return errors.Unavailable("the peer has ended the call")
    code = error.code()
    cls = _BY_STATUS.get(code.name, errors.Internal)
    trailing = dict(error.trailing_metadata() or ())
    param = trailing.get(_PARAM_KEY)
    return cls(error.details() or code.name, str(param) if param else None)
