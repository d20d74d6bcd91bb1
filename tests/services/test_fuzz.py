"""Nonsense at every gRPC method: random bytes, damaged messages, chunk streams that no sender would send. The answer is always a
typed error; the worker goes on, serves the next request exactly, and keeps nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import xxhash
from google.protobuf.message import Message

from shared.base.worker_info import Role
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, control_pb2_grpc, kv_pb2, kv_pb2_grpc, request_pb2
from shared.wire.conversions import request_to_wire
from shared.wire.errors import is_broken_write
from tests.support.cluster import Cluster, FakeWorker, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import GEOMETRY, expected_tokens
from tests.support.messages import chunk_of, commit_of, geometry_of, key_of
from tests.support.nonsense import damaged, random_message

SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.randrange(2**32)
NUM_ROUNDS = 20
CALL_TIMEOUT_S = 0.3  # for those that wait, as a Generate does for its transfer

TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,  # of another role
    grpc.StatusCode.CANCELLED,  # by this side, which had more to send than the server wanted to hear
}
UNARY_UNARY = (
    ("/twostroke.v1.Decode/StopChoice", control_pb2.StopChoiceRequest),
    ("/twostroke.v1.KvTransfer/GetOffers", kv_pb2.OffersRequest),
    ("/twostroke.v1.KvTransfer/Open", kv_pb2.OpenRequest),
    ("/twostroke.v1.KvTransfer/Abort", kv_pb2.AbortRequest),
)
UNARY_STREAM = (
    ("/twostroke.v1.Decode/Generate", control_pb2.GenerateRequest),
    ("/twostroke.v1.Prefill/Prefill", control_pb2.PrefillRequest),
    ("/twostroke.v1.KvTransfer/Join", kv_pb2.JoinRequest),
)
PUSH = "/twostroke.v1.KvTransfer/Push"


@pytest.fixture
def rng() -> random.Random:
    print("FUZZ_SEED", SEED)
    return random.Random(SEED)


def right(kind: type[Message], decode: FakeWorker) -> Message:
    """A message that a worker would take, if there is one that stands alone."""
    asked = request_to_wire(request(prompt_of(20)))
    if kind is control_pb2.GenerateRequest:
        return control_pb2.GenerateRequest(request=asked)
    if kind is control_pb2.PrefillRequest:
        info = decode.info()
        destination = control_pb2.Destination(transfer_id=bytes(16), address=info.address, boot_id=info.boot_id)
        return control_pb2.PrefillRequest(request=asked, destination=destination)
    return kind()


def nonsense(rng: random.Random, kind: type[Message], decode: FakeWorker, count: int = 4) -> Iterator[bytes]:
    """Bytes that are no message, messages of random fields, and right ones with little wrong."""
    for _ in range(count):
        if rng.random() < 0.2:
            yield rng.randbytes(rng.choice([0, 1, 10, 300]))
            continue
        is_nearly_right = rng.random() < 0.5
        message = random_message(rng, right(kind, decode), 0.1) if is_nearly_right else random_message(rng, kind())
        data = message.SerializeToString()
        yield damaged(rng, data) if rng.random() < 0.3 else data


async def status_of(call: object) -> grpc.StatusCode:
    """How a call ended, whatever it returned before."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call  # type: ignore[misc]
    except grpc.RpcError as error:
        # No answer of the server's, which is lost then: the library says so of this side's writing.
        return grpc.StatusCode.CANCELLED if is_broken_write(error) else error.code()  # type: ignore[no-any-return]
    except asyncio.CancelledError:  # how the library tells that the server ended a call which it was still feeding
        assert call.done()  # type: ignore[attr-defined]
        return await call.code()  # type: ignore[attr-defined, no-any-return]
    return grpc.StatusCode.OK


async def assert_unharmed(made: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Both workers are idle, whole, and serve exactly; nothing was unforeseen."""
    for worker in made.workers:
        await eventually(worker.is_idle)
        worker.check_baseline()
    asked = request(prompt_of(40))
    assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
    for worker in made.workers:
        await worker.worker.streams.wait_idle()
        worker.check_baseline()
    assert not [r for r in caplog.records if r.getMessage().endswith(" failed") and r.name == "shared.wire.serving"]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_nonsense_at_every_method_gets_a_typed_error_and_leaves_the_worker_as_it_was(
    role: Role, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        workers = {r: await made.add(r) for r in (Role.PREFILL, Role.DECODE)}
        decode, channel = workers[Role.DECODE], made.channels.get(workers[role].info().address)
        codes: list[grpc.StatusCode] = []
        for _ in range(NUM_ROUNDS):
            calls = [
                channel.unary_unary(path)(data, timeout=CALL_TIMEOUT_S)
                for path, kind in UNARY_UNARY
                for data in nonsense(rng, kind, decode)
            ]
            calls += [
                channel.unary_stream(path)(data, timeout=CALL_TIMEOUT_S)
                for path, kind in UNARY_STREAM
                for data in nonsense(rng, kind, decode)
            ]
            streams = [list(nonsense(rng, kv_pb2.PushRequest, decode, rng.randrange(4))) for _ in range(4)]
            calls += [channel.stream_unary(PUSH)(iter(stream), timeout=CALL_TIMEOUT_S) for stream in streams]
            codes += await asyncio.gather(*(status_of(call) for call in calls))
        assert set(codes) <= TYPED | {grpc.StatusCode.OK}, set(codes)
        assert grpc.StatusCode.INVALID_ARGUMENT in codes
        await assert_unharmed(made, caplog)


def shuffled_stream(rng: random.Random, key: kv_pb2.TransferKey, num_blocks: int) -> list[kv_pb2.PushRequest]:
    """A whole transfer's messages; mostly with one or more of them damaged, dropped, repeated or moved."""
    chunks = []
    for number in range(num_blocks):
        data = rng.randbytes(GEOMETRY.block_bytes)
        chunk = kv_pb2.Chunk(
            sequence_number=number, first_block=number, num_blocks=1, num_layers=2, num_heads=2,
            checksum=xxhash.xxh3_64_intdigest(data), data=data,
        )  # fmt: skip
        chunks.append(kv_pb2.PushRequest(key=key, chunk=chunk))
    first = request_pb2.Token(index=0, token_id=rng.randrange(1000))
    commit = kv_pb2.Commit(num_chunks=num_blocks, num_blocks=num_blocks, first_tokens=[first])
    messages = [*chunks, kv_pb2.PushRequest(key=key, commit=commit)]
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(messages))
        match rng.randrange(6):
            case 0:
                messages.insert(rng.randrange(len(messages)), messages[place])
            case 1 if len(messages) > 1:
                del messages[place]
            case 2:
                rng.shuffle(messages)
            case 3:
                messages[place] = random_message(rng, kv_pb2.PushRequest())  # type: ignore[assignment]
            case 4:
                changed = kv_pb2.PushRequest()
                changed.CopyFrom(messages[place])
                random_message(rng, changed.commit if changed.WhichOneof("payload") == "commit" else changed.chunk)
                messages[place] = changed
            case 5:
                messages = messages[:place]
                if not messages:
                    return []
    return messages


async def push_nonsense(rng: random.Random, made: Cluster, decode: FakeWorker) -> grpc.StatusCode:
    """One expected transfer, opened as it should be, and then a stream of chunks that is mostly wrong."""
    channel = made.channels.get(decode.info().address)
    asked, transfer_id = request(prompt_of(rng.randrange(1, 60)), max_tokens=1), rng.randbytes(16)
    message = control_pb2.GenerateRequest(request=request_to_wire(asked), handoff=control_pb2.Handoff(transfer_id=transfer_id))
    generate = control_pb2_grpc.DecodeStub(channel).Generate(message, timeout=10)
    accepted = await generate.read()
    key = kv_pb2.TransferKey(transfer_id=transfer_id, attempt=0, boot_id=accepted.accepted.boot_id)
    num_blocks = -(-len(asked.token_ids) // GEOMETRY.block_size)
    stub = kv_pb2_grpc.KvTransferStub(channel)
    await stub.Open(kv_pb2.OpenRequest(key=key, geometry=geometry_of(), num_blocks=num_blocks), timeout=5)

    async def messages() -> AsyncIterator[kv_pb2.PushRequest]:
        for one in shuffled_stream(rng, key, num_blocks):
            yield one

    code = await status_of(stub.Push(messages(), timeout=5))
    generate.cancel()
    return code


async def test_chunk_streams_that_no_sender_would_send_are_refused_and_give_their_blocks_back(
    rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        decode = await made.add(Role.DECODE)
        codes = []
        for _ in range(20):
            codes += await asyncio.gather(*(push_nonsense(random.Random(rng.random()), made, decode) for _ in range(6)))
        assert set(codes) <= TYPED | {grpc.StatusCode.OK}, set(codes)
        assert grpc.StatusCode.OK in codes  # the stream was right, or what was wrong in it did not matter
        assert grpc.StatusCode.DATA_LOSS in codes
        # No real prompt has these blocks: what a right stream of random bytes brought must not be found in the prefix cache.
        made.workers.remove(decode)
        await eventually(decode.is_idle)
        decode.check_baseline()
        await decode.stop()
        await made.add(Role.DECODE)
        made.watcher.workers.pop(decode.info().worker_id)
        await assert_unharmed(made, caplog)


async def generate_for(made: Cluster, decode: FakeWorker, transfer_id: bytes, num_tokens: int) -> tuple[Any, kv_pb2.TransferKey]:
    """A Generate stream that waits for this transfer, and the key of its first attempt."""
    asked = request(prompt_of(num_tokens, sum(transfer_id)), max_tokens=1)
    handoff = control_pb2.Handoff(transfer_id=transfer_id)
    message = control_pb2.GenerateRequest(request=request_to_wire(asked), handoff=handoff)
    generate = control_pb2_grpc.DecodeStub(made.channels.get(decode.info().address)).Generate(message, timeout=20)
    accepted = await generate.read()
    return generate, key_of(0, accepted.accepted.boot_id, transfer_id)


async def rest_of(generate: Any) -> AsyncIterator[control_pb2.GenerateReply]:
    """Of a stream that was read from before."""
    while (reply := await generate.read()) is not grpc.aio.EOF:
        yield reply


def right_push(key: kv_pb2.TransferKey, num_blocks: int) -> list[kv_pb2.PushRequest]:
    chunks = [kv_pb2.PushRequest(key=key, chunk=chunk_of(number, number)) for number in range(num_blocks)]
    return [*chunks, kv_pb2.PushRequest(key=key, commit=commit_of(num_blocks, num_blocks))]


async def attack(rng: random.Random, made: Cluster, decode: FakeWorker) -> list[grpc.StatusCode]:
    """Every method of the service, with the right key of a transfer of its own and nonsense beside it."""
    channel, transfer_id = made.channels.get(decode.info().address), rng.randbytes(16)
    generate, key = await generate_for(made, decode, transfer_id, 40)
    stub = kv_pb2_grpc.KvTransferStub(channel)
    opening = kv_pb2.OpenRequest(key=key, geometry=geometry_of(), num_blocks=3)
    wrong_opening = kv_pb2.OpenRequest()
    random_message(rng, wrong_opening)
    wrong_opening.key.CopyFrom(key)
    if rng.random() < 0.5:
        wrong_opening.geometry.CopyFrom(geometry_of())
    joining = kv_pb2.JoinRequest(boot_id=key.boot_id, transport=rng.choice(["gloo", "nccl", "grpc", ""]), link_id=rng.randbytes(15))
    codes = [await status_of(stub.Open(wrong_opening, timeout=1)), await status_of(stub.Join(joining, timeout=1))]
    codes.append(await status_of(stub.Open(opening, timeout=2)))
    messages = right_push(key, 3)
    place = rng.choice([0, 1, 2, 3, 3, 3])  # mostly the commit
    which = messages[place].WhichOneof("payload")
    random_message(rng, getattr(messages[place], str(which)), 1.0)
    codes.append(await status_of(stub.Push(iter(messages), timeout=5)))
    codes.append(await status_of(stub.Abort(random_message(rng, kv_pb2.AbortRequest(key=key)), timeout=1)))
    generate.cancel()
    return codes


async def test_a_peer_that_knows_its_own_keys_can_harm_no_other_transfer(
    rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        patient = WorkerConfig(transfer_timeout_s=20.0, max_num_batched_tokens=64)
        decode = await made.add(Role.DECODE, 128, config=patient)
        stub = kv_pb2_grpc.KvTransferStub(made.channels.get(decode.info().address))
        for number in range(6):
            generate, key = await generate_for(made, decode, bytes([number]) * 16, 40)
            await stub.Open(kv_pb2.OpenRequest(key=key, geometry=geometry_of(), num_blocks=3), timeout=5)
            codes = [c for some in await asyncio.gather(*(attack(rng, made, decode) for _ in range(6))) for c in some]
            assert set(codes) <= TYPED | {grpc.StatusCode.OK}, set(codes)
            assert grpc.StatusCode.DATA_LOSS in codes
            await stub.Push(iter(right_push(key, 3)), timeout=5)
            replies = [reply async for reply in rest_of(generate)]
            assert [t.token_id for reply in replies for tokens in reply.tokens for t in tokens.tokens] == [7]
        # No real prompt has these blocks, which stay in its prefix cache.
        made.workers.remove(decode)
        await eventually(decode.is_idle)
        decode.check_baseline()
        await decode.stop()
        await made.add(Role.DECODE)
        made.watcher.workers.pop(decode.info().worker_id)
        await assert_unharmed(made, caplog)
