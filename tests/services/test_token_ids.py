"""Token ids outside the vocabulary get no further than a worker's door, and disturb nobody behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from shared.base.errors import InvalidRequest
from shared.base.request import Request
from shared.base.worker_info import Role
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import request_to_wire
from tests.support.cluster import Cluster, FakeWorker, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import VOCAB_SIZE, expected_tokens

OUTSIDE: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("stop_token_ids", {"stop_token_ids": (VOCAB_SIZE,)}),
    ("logit_bias", {"logit_bias": {VOCAB_SIZE: 1.0}}),
]


def outside(field: str, options: dict[str, Any]) -> Request:
    return request([*prompt_of(20), VOCAB_SIZE if field == "prompt" else 1], **options)


@pytest.fixture
async def made() -> AsyncIterator[Cluster]:
    async with cluster() as one:
        yield one


async def assert_it_serves(made: Cluster) -> None:
    prompt = prompt_of(20)
    assert await made.run(request(prompt)) == {0: expected_tokens(prompt, 8)}
    for worker in made.workers:
        await eventually(worker.is_idle)
        worker.check_baseline()


@pytest.mark.parametrize(("field", "options"), OUTSIDE)
async def test_decode_refuses_them(made: Cluster, field: str, options: dict[str, Any]) -> None:
    await made.add(Role.COLOCATED)
    with pytest.raises(InvalidRequest, match=f"{field} has token id {VOCAB_SIZE}") as caught:
        await made.run(outside(field, options))
    assert caught.value.param == field
    await assert_it_serves(made)


@pytest.mark.parametrize(("field", "options"), OUTSIDE)
async def test_prefill_refuses_them(made: Cluster, field: str, options: dict[str, Any]) -> None:
    prefill, decode = await made.add(Role.PREFILL), await made.add(Role.DECODE)
    async with grpc.aio.insecure_channel(prefill.info().address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in control_pb2_grpc.PrefillStub(channel).Prefill(message_to(decode, outside(field, options))):
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{field} has token id {VOCAB_SIZE}" in (caught.value.details() or "")
    await assert_it_serves(made)


def message_to(decode: FakeWorker, asked: Request) -> control_pb2.PrefillRequest:
    info = decode.info()
    destination = control_pb2.Destination(transfer_id=bytes(16), address=info.address, boot_id=info.boot_id)
    return control_pb2.PrefillRequest(request=request_to_wire(asked), destination=destination)
