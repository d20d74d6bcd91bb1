"""Seats by arrival, with real workers and calls: more handoff clients than a decode worker has seats, and a request among them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

import pytest

from shared.base.request import Request
from shared.base.worker_info import Role
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import output_from_wire, request_to_wire
from tests.support.cluster import Cluster, FakeWorker, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import expected_tokens

NUM_SEATS = 4
CONFIG = WorkerConfig(max_num_seqs=NUM_SEATS, max_num_batched_tokens=64, transfer_timeout_s=10.0)
NUM_TOKENS = 16  # of each handoff
_starts = count()


async def client(made: Cluster, ended: list[Request]) -> None:
    """One handed-over request after the other."""
    while True:
        asked = request(prompt_of(20, next(_starts)), max_tokens=NUM_TOKENS)
        assert (await made.run(asked, 30.0))[0] == expected_tokens(asked.token_ids, NUM_TOKENS)
        ended.append(asked)


async def generate_here(made: Cluster, decode: FakeWorker, asked: Request) -> list[int]:
    """At this worker and without handoff."""
    stub = control_pb2_grpc.DecodeStub(made.channels.get(decode.info().address))
    call = stub.Generate(control_pb2.GenerateRequest(request=request_to_wire(asked)), timeout=30)
    outputs = [output_from_wire("", tokens) async for reply in call for tokens in reply.tokens]
    return [token.token_id for output in outputs for token in output.tokens]


@pytest.mark.parametrize("num_emitted", [0, 5], ids=["local", "continued"])
async def test_a_request_among_twice_as_many_handoffs_as_seats_ends_within_twice_the_time_of_a_plain_queue(
    num_emitted: int,
) -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL, num_blocks=128)
        decode = await made.add(Role.DECODE, num_blocks=128, config=CONFIG)
        ended: list[Request] = []
        clients = [asyncio.create_task(client(made, ended)) for _ in range(2 * NUM_SEATS)]
        try:
            await eventually(lambda: len(ended) > 2 * NUM_SEATS)
            prompt = prompt_of(9, 5)
            emitted = expected_tokens(prompt, num_emitted)
            sampling = request(prompt, max_tokens=num_emitted + 10).sampling
            num_before = len(ended)
            tokens = await generate_here(made, decode, Request("own", [*prompt, *emitted], len(prompt), sampling))
            num_meanwhile = len(ended) - num_before
        finally:
            for task in clients:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*clients)
        assert tokens == expected_tokens(prompt, num_emitted + 10)[num_emitted:]
        before_it, beside_it = 2 * NUM_SEATS, NUM_SEATS  # in a plain queue
        assert num_meanwhile <= 2 * (before_it + beside_it)
