"""A Generate stream as its reader sees it: outputs that are stopped, messages that merge what waits, readers that are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.decode.server import DecodeService, _merge
from shared.base.errors import Overloaded
from shared.base.request import FinishReason, Output, Request, Token
from shared.base.worker_info import Role
from shared.engine.schedule.plan import Failure
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import output_from_wire, request_to_wire
from shared.worker import streams
from shared.worker.streams import Mailbox, Streams
from tests.support.cluster import Cluster, FakeWorker, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import expected_tokens

CHOICES = range(3)


@asynccontextmanager
async def decode_worker() -> AsyncIterator[tuple[Cluster, FakeWorker, control_pb2_grpc.DecodeStub]]:
    async with cluster() as made:
        worker = await made.add(Role.DECODE)
        yield made, worker, control_pb2_grpc.DecodeStub(made.channels.get(worker.info().address))


def generate(stub: control_pb2_grpc.DecodeStub, asked: Request, timeout_s: float = 20.0) -> Any:
    return stub.Generate(control_pb2.GenerateRequest(request=request_to_wire(asked)), timeout=timeout_s)


async def outputs_of(call: Any, asked: Request) -> list[Output]:
    outputs = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        outputs += [output_from_wire(asked.request_id, tokens) for tokens in reply.tokens]
    return outputs


def by_choice(outputs: list[Output]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for output in outputs:
        for token in output.tokens:
            assert token.index == len(tokens.setdefault(output.choice, []))
            tokens[output.choice].append(token.token_id)
    return tokens


async def test_a_stopped_choice_is_computed_no_further_and_the_others_go_on() -> None:
    async with decode_worker() as (_, worker, stub):
        asked = request(prompt_of(20), max_tokens=60, n=3)
        worker.runner.gate.clear()
        call = generate(stub, asked)
        await call.read()
        worker.runner.gate.set()
        first = await call.read()
        worker.runner.gate.clear()
        for _ in range(2):
            stop = control_pb2.StopChoiceRequest(request_id=asked.request_id, choice=1)
            assert await stub.StopChoice(stop) == control_pb2.StopChoiceReply()
        worker.runner.gate.set()
        outputs = [output_from_wire(asked.request_id, tokens) for tokens in first.tokens] + await outputs_of(call, asked)
        tokens = by_choice(outputs)
        for choice in CHOICES:
            expected = expected_tokens(asked.token_ids, 60, choice=choice)
            assert tokens[choice] == (expected[: len(tokens[choice])] if choice == 1 else expected)
        assert len(tokens[1]) < 10
        ends = [(output.choice, output.finish_reason) for output in outputs if output.finish_reason is not None]
        assert sorted(ends, key=lambda end: end[0]) == [
            (0, FinishReason.LENGTH),
            (1, FinishReason.STOP),
            (2, FinishReason.LENGTH),
        ]
        await eventually(worker.is_idle)
        worker.check_baseline()


async def test_a_request_whose_choices_are_all_stopped_ends() -> None:
    async with decode_worker() as (_, worker, stub):
        asked = request(prompt_of(20), max_tokens=400, n=3)
        call = generate(stub, asked)
        await call.read()
        for choice in CHOICES:
            await stub.StopChoice(control_pb2.StopChoiceRequest(request_id=asked.request_id, choice=choice))
        outputs = await outputs_of(call, asked)
        assert {output.choice for output in outputs if output.finish_reason is FinishReason.STOP} == set(CHOICES)
        assert worker.runner.num_steps < 400
        await eventually(worker.is_idle)
        worker.check_baseline()


@pytest.mark.parametrize("stops", [{("nobody", 0)}, {("own", 3)}, {("own", 2**31)}])
async def test_stopping_what_is_not_there_is_no_error_and_disturbs_nothing(stops: set[tuple[str, int]]) -> None:
    async with decode_worker() as (_, _, stub):
        asked = request(prompt_of(20), max_tokens=30, n=3)
        call = generate(stub, asked)
        await call.read()
        for name, choice in stops:
            request_id = asked.request_id if name == "own" else name
            await stub.StopChoice(control_pb2.StopChoiceRequest(request_id=request_id, choice=choice))
        tokens = by_choice(await outputs_of(call, asked))
        assert tokens == {choice: expected_tokens(asked.token_ids, 30, choice=choice) for choice in CHOICES}


async def test_all_outputs_of_a_step_come_in_one_message() -> None:
    async with decode_worker() as (_, _, stub):
        asked = request(prompt_of(20), max_tokens=30, n=3)
        replies = [reply async for reply in generate(stub, asked)]
        assert len(replies) <= 1 + 30
        assert all(len({tokens.choice for tokens in reply.tokens}) == len(reply.tokens) for reply in replies)


async def test_a_reader_that_never_reads_holds_nothing_after_its_deadline() -> None:
    async with decode_worker() as (made, worker, stub):
        calls = [generate(stub, request(prompt_of(20, start), max_tokens=400), timeout_s=0.5) for start in range(3)]
        await eventually(lambda: worker.runner.num_steps > 2)
        async with asyncio.timeout(5):
            await worker.worker.streams.wait_idle()
        await eventually(worker.is_idle)
        worker.check_baseline()
        for call in calls:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        asked = request(prompt_of(20, 9))
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)


async def test_a_reader_that_leaves_too_much_gets_what_there_is_then_an_error_and_its_seat_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_SIZE", 20)
    async with decode_worker() as (_, worker, _):
        asked = request(prompt_of(20), max_tokens=200)
        is_full = asyncio.Event()

        def end() -> None:
            worker.worker.engine.abort(asked.request_id)
            is_full.set()

        mailbox = worker.worker.streams.open(asked.request_id, end)
        worker.worker.engine.submit(asked)
        async with asyncio.timeout(10):
            await is_full.wait()
        await eventually(worker.is_idle)
        events = await mailbox.take()
        tokens = [token.token_id for event in events if isinstance(event, Output) for token in event.tokens]
        assert tokens == expected_tokens(asked.token_ids, 21)
        with pytest.raises(Overloaded, match="too slow"):
            await mailbox.take()
        worker.worker.streams.close(asked.request_id)
        worker.check_baseline()


async def test_a_generate_call_whose_messages_are_not_taken_gives_its_seat_back_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_SIZE", 20)
    async with decode_worker() as (_, worker, _):
        made, asked = worker.worker, request(prompt_of(20), max_tokens=400)
        service = DecodeService(made, made.engine, made.streams, None)
        replies = service.Generate(control_pb2.GenerateRequest(request=request_to_wire(asked)), None)
        assert (await anext(replies)).HasField("accepted")
        await eventually(lambda: worker.runner.num_steps > 20)
        await eventually(worker.is_idle)
        reply = await anext(replies)
        with pytest.raises(Overloaded, match="too slow"):
            await anext(replies)
        outputs = [output_from_wire(asked.request_id, tokens) for tokens in reply.tokens]
        assert by_choice(outputs)[0] == expected_tokens(asked.token_ids, 21)
        worker.check_baseline()


def test_what_waits_is_one_output_for_each_choice_and_nothing_after_its_end() -> None:
    stopped = Output("r", 0, (), FinishReason.STOP)
    events = [output(0), output(5, choice=1), output(1), stopped, output(2), output(9, choice=2)]
    merged = _merge(events, {0, 1})
    assert [(o.choice, [t.index for t in o.tokens], o.finish_reason) for o in merged] == [
        (0, [0, 1], FinishReason.STOP),
        (1, [5], None),
    ]


async def test_a_worker_is_idle_only_when_its_last_stream_has_ended() -> None:
    made = Streams(asyncio.get_running_loop())
    for name in ("a", "b"):
        made.open(name)
    idle = asyncio.create_task(made.wait_idle())
    made.close("a")
    made.close("nobody")
    await asyncio.sleep(0)
    assert not idle.done()
    made.close("b")
    await idle


def output(index: int, num_logprobs: int = 0, choice: int = 0) -> Output:
    return Output("r", choice, (Token(index, 7, -1.0, ((7, -1.0),) * num_logprobs),))


async def test_a_mailbox_gives_all_that_waits_in_order_and_then_waits() -> None:
    mailbox = Mailbox(lambda: None)
    failure = Failure("r", Overloaded("x"))
    for event in (output(0), output(1), failure):
        mailbox.put(event)
    assert await mailbox.take() == [output(0), output(1), failure]
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put(output(2))
    assert await taking == [output(2)]


@pytest.mark.parametrize(("num_logprobs", "num_outputs"), [(0, 21), (4, 5)])
async def test_what_a_mailbox_holds_is_bounded_and_logprobs_count(
    monkeypatch: pytest.MonkeyPatch, num_logprobs: int, num_outputs: int
) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_SIZE", 20)
    full: list[bool] = []
    mailbox = Mailbox(lambda: full.append(True))
    for index in range(100):
        mailbox.put(output(index, num_logprobs))
    assert full == [True]
    assert len(await mailbox.take()) == num_outputs


async def test_a_mailbox_that_is_emptied_in_time_is_never_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_SIZE", 20)
    mailbox = Mailbox(lambda: pytest.fail("full"))
    for index in range(100):
        mailbox.put(output(index))
        if index % 20 == 19:
            assert len(await mailbox.take()) == 20
