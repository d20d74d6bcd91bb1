"""What becomes of a call's status."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from shared.base.errors import CorruptTransfer, Internal, TwostrokeError, Unavailable
from shared.wire.errors import from_rpc_error


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.DATA_LOSS, "checksum", CorruptTransfer),
        (grpc.StatusCode.INTERNAL, "an engine step failed: ValueError", Internal),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", Unavailable),  # the library's, of a write that came too late
        (grpc.StatusCode.UNKNOWN, "what the peer did not foresee", Internal),
    ],
)
def test_an_error_keeps_its_type_and_a_write_that_came_too_late_means_unavailable(
    code: grpc.StatusCode, details: str, expected: type[TwostrokeError]
) -> None:
    error = from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details))
    assert type(error) is expected
