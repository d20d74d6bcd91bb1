"""A generation as its reader sees it: bounded, in order, each token once, ended whatever happens, told nothing it should not know.

The workers are scripted: each says exactly what a test wants it to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.dispatch import legs
from services.router.dispatch import metrics as leg_metrics
from shared.base.errors import (
    Cancelled,
    CorruptTransfer,
    DeadlineExceeded,
    IncompatiblePeer,
    Internal,
    InvalidRequest,
    Overloaded,
    StaleTransfer,
    TwostrokeError,
    Unauthorized,
    Unavailable,
)
from shared.base.request import Output, Request, choice_seed
from shared.base.worker_info import Role
from shared.rpc import control_pb2
from tests.support.cluster import Cluster, cluster, collect_tokens, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import expected_tokens
from tests.support.scripted_worker import ScriptedWorker, forever, replies, tokens_reply

PROMPT = prompt_of(20)


def decode(answer: Any, **kwargs: Any) -> ScriptedWorker:
    return ScriptedWorker(Role.COLOCATED, answer, **kwargs)


def says(*messages: Any, then: Exception | None = None) -> Any:
    """The same to every request."""
    return lambda _: replies(*messages, then=then)


def num_failures(leg: str, cause: str) -> float:
    return leg_metrics.failovers.labels(leg, cause)._value.get()


async def endless(message: control_pb2.GenerateRequest) -> AsyncIterator[Any]:
    for index in range(10**9):
        yield tokens_reply(index, [index % 1000])


# Bounded


async def test_a_reader_that_never_reads_bounds_what_waits_and_gives_its_place_back_at_the_deadline() -> None:
    async with cluster() as made:
        worker = await decode(endless).join(made)
        generation = made.dispatcher.generate(request(PROMPT, max_tokens=100_000), deadline_s=1.0)
        await anext(generation)
        await eventually(lambda: len(generation._outputs._waiting) == 64)
        await eventually(lambda: worker.num_open == 0)  # nobody has read
        assert len(generation._outputs._waiting) <= 64
        for _ in range(64):
            await anext(generation)
        with pytest.raises(DeadlineExceeded, match="1 s"):
            await anext(generation)


async def test_iterating_after_a_failure_raises_it_again() -> None:
    async with cluster() as made:
        await decode(says(then=InvalidRequest("no", param="prompt"))).join(made)
        generation = made.dispatcher.generate(request(PROMPT), 5.0)
        for _ in range(3):
            async with asyncio.timeout(5):
                with pytest.raises(InvalidRequest, match="no"):
                    await anext(generation)


async def test_iterating_after_aclose_ends_also_if_it_never_began() -> None:
    async with cluster() as made:
        worker = await decode(endless).join(made)
        fresh, running = (made.dispatcher.generate(request(PROMPT, max_tokens=1000), 5.0) for _ in range(2))
        await anext(running)
        for generation in (fresh, running):
            await generation.aclose()
            await generation.aclose()
            for _ in range(2):
                with pytest.raises(StopAsyncIteration):
                    await anext(generation)
        await eventually(lambda: worker.num_open == 0)
        assert len(worker.requests) == 1


async def test_a_reader_whose_channels_are_closed_under_it_gets_an_error() -> None:
    async with cluster() as made:
        await decode(lambda _: forever(tokens_reply(0, [7]))).join(made)
        generation = made.dispatcher.generate(request(PROMPT), 20.0)
        await anext(generation)
        await made.channels.close()
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable):
                await anext(generation)


async def test_a_reader_whose_work_is_cancelled_from_outside_gets_an_error() -> None:
    async with cluster() as made:
        await decode(lambda _: forever(tokens_reply(0, [7]))).join(made)
        generation = made.dispatcher.generate(request(PROMPT), 20.0)
        await anext(generation)
        assert generation._work is not None
        generation._work.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable, match="stopped"):
                await anext(generation)


# Each token once, in order


async def run(made: Cluster, asked: Request, deadline_s: float = 10.0) -> list[Output]:
    return [output async for output in made.dispatcher.generate(asked, deadline_s)]


async def test_repeated_token_indices_are_passed_on_once() -> None:
    async with cluster() as made:
        messages = [tokens_reply(0, [1, 2]), tokens_reply(0, [1, 2]), tokens_reply(1, [2, 3]), tokens_reply(3, [4], is_last=True)]
        await decode(says(*messages)).join(made)
        asked = request(PROMPT, max_tokens=4)
        outputs = await run(made, asked)
        assert collect_tokens(outputs, asked) == {0: [1, 2, 3, 4]}
        assert [len(output.tokens) for output in outputs] == [2, 1, 1]


async def test_a_gap_fails_its_worker_and_the_request_goes_on_at_another() -> None:
    async with cluster() as made:
        before = num_failures("decode", Internal.kind)
        await decode(says(tokens_reply(0, [1]), tokens_reply(2, [3]))).join(made)
        generation = made.dispatcher.generate(asked := request(PROMPT, max_tokens=3), 10.0)
        outputs = [await anext(generation)]
        healthy = await decode(says(tokens_reply(1, [2, 3], is_last=True))).join(made)
        outputs += [output async for output in generation]
        assert collect_tokens(outputs, asked) == {0: [1, 2, 3]}
        assert num_failures("decode", Internal.kind) > before
        assert list(healthy.requests[0].request.token_ids) == [*PROMPT, 1]
        assert healthy.requests[0].request.num_prompt_tokens == len(PROMPT)


async def test_a_choice_that_was_not_asked_for_fails_its_worker() -> None:
    async with cluster() as made:
        before = num_failures("decode", Internal.kind)
        await decode(says(tokens_reply(0, [1], choice=1))).join(made)
        with pytest.raises(Internal):
            await run(made, request(PROMPT, max_tokens=1))
        assert num_failures("decode", Internal.kind) - before == 5


async def test_a_stream_that_ends_early_is_continued() -> None:
    async with cluster() as made:
        calls: list[int] = []

        def answer(message: control_pb2.GenerateRequest) -> AsyncIterator[Any]:
            calls.append(len(message.request.token_ids) - len(PROMPT))
            return replies(tokens_reply(calls[-1], [calls[-1]], is_last=calls[-1] == 6))

        await decode(answer).join(made)
        asked = request(PROMPT, max_tokens=7)
        assert collect_tokens(await run(made, asked), asked) == {
            0: list(range(7))
        }  # more failures than a request may have in a row
        assert calls == list(range(7))


async def test_five_failures_without_a_token_end_the_request() -> None:
    async with cluster() as made:
        worker = await decode(says(then=Internal("broken"))).join(made)
        with pytest.raises(Internal):
            await run(made, request(PROMPT))
        assert len(worker.requests) == 5


async def test_cached_tokens_are_those_of_the_first_answer() -> None:
    async with cluster() as made:
        await decode(says(tokens_reply(0, [1], cached=16), then=Unavailable("gone"))).join(made)
        generation = made.dispatcher.generate(asked := request(PROMPT, max_tokens=2), 10.0)
        outputs = [await anext(generation)]
        await decode(says(tokens_reply(1, [2], is_last=True, cached=20))).join(made)
        outputs += [output async for output in generation]
        assert collect_tokens(outputs, asked) == {0: [1, 2]}
        assert [output.num_cached_tokens for output in outputs] == [16, 0]


async def test_a_worker_that_was_restarted_meanwhile_is_not_trusted() -> None:
    async with cluster() as made:
        worker = await decode(says(tokens_reply(0, [1], is_last=True))).join(made)
        made.dispatcher._worker_wait_s = 0.2
        listed = worker.info()
        worker._info = made.announce_info(listed, listed.address)
        object.__setattr__(worker._info, "boot_id", "another")
        made.watcher.workers[listed.worker_id] = listed
        with pytest.raises(Unavailable):
            await run(made, request(PROMPT, max_tokens=1))


# Prefill


def prefilled(*events: Any, then: Exception | None = None) -> ScriptedWorker:
    return ScriptedWorker(Role.PREFILL, says(*events, then=then))


def without_handoff(message: control_pb2.GenerateRequest) -> AsyncIterator[Any]:
    """A decode worker's answer: a token if it computes the prompt itself."""
    return forever() if message.HasField("handoff") else replies(tokens_reply(0, [5], is_last=True))


async def test_the_second_attempt_is_made_at_another_prefill_worker_with_the_next_number() -> None:
    async with cluster() as made:
        prefills = [await prefilled(then=Internal("broken")).join(made) for _ in range(2)]
        decoder = await ScriptedWorker(Role.DECODE, without_handoff).join(made)
        await run(made, request(PROMPT, max_tokens=1))
        assert [len(p.requests) for p in prefills] == [1, 1]
        destinations = sorted((p.requests[0].destination for p in prefills), key=lambda d: d.attempt)
        assert [d.attempt for d in destinations] == [0, 1]
        assert len({d.transfer_id for d in destinations}) == 1
        assert len(destinations[0].transfer_id) == 16
        assert {(d.address, d.boot_id) for d in destinations} == {(decoder.info().address, decoder.info().boot_id)}
        assert [m.HasField("handoff") for m in decoder.requests] == [True, False]


async def test_at_most_three_prefill_workers_are_tried() -> None:
    async with cluster() as made:
        prefills = [await prefilled(then=Internal("broken")).join(made) for _ in range(5)]
        await ScriptedWorker(Role.DECODE, without_handoff).join(made)
        await run(made, request(PROMPT, max_tokens=1))
        assert sum(len(p.requests) for p in prefills) == 3


async def test_where_decode_is_full_one_prefill_attempt_is_made_and_nobody_is_blamed() -> None:
    async with cluster() as made:
        prefills = [await prefilled(then=Overloaded("no room")).join(made) for _ in range(2)]
        await ScriptedWorker(Role.DECODE, without_handoff).join(made)
        await run(made, request(PROMPT, max_tokens=1))
        assert sum(len(p.requests) for p in prefills) == 1
        assert not any(made.fleet._rests.is_resting(p.info()) for p in prefills)


async def test_the_clients_mistake_at_prefill_ends_the_request() -> None:
    async with cluster() as made:
        prefill = await prefilled(then=InvalidRequest("too long", param="prompt")).join(made)
        decoder = await ScriptedWorker(Role.DECODE, lambda _: forever()).join(made)
        with pytest.raises(InvalidRequest, match="too long"):
            await run(made, request(PROMPT))
        assert (len(prefill.requests), len(decoder.requests)) == (1, 1)
        await eventually(lambda: decoder.num_open == 0)


# Silence


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    init = legs.SilenceWatch.__init__
    monkeypatch.setattr(legs.SilenceWatch, "__init__", lambda self, on_silence: init(self, on_silence, 0.3))


@pytest.mark.usefixtures("short_silence")
async def test_a_silent_decode_worker_is_left() -> None:
    async with cluster() as made:
        silent = await decode(lambda _: forever(tokens_reply(0, [1]))).join(made)
        generation = made.dispatcher.generate(asked := request(PROMPT, max_tokens=2), 10.0)
        outputs = [await anext(generation)]
        await decode(says(tokens_reply(1, [2], is_last=True))).join(made)
        async with asyncio.timeout(3):
            outputs += [output async for output in generation]
        assert collect_tokens(outputs, asked) == {0: [1, 2]}
        await eventually(lambda: silent.num_open == 0)


@pytest.mark.usefixtures("short_silence")
async def test_heartbeats_keep_both_legs_alive() -> None:
    async def slowly(last: Any, heartbeat: Any) -> AsyncIterator[Any]:
        for _ in range(8):
            await asyncio.sleep(0.1)
            yield heartbeat
        yield last

    async with cluster() as made:
        reply = control_pb2.PrefillEvent(reply=control_pb2.PrefillReply(queue_s=1.0))
        prefill = await ScriptedWorker(Role.PREFILL, lambda _: slowly(reply, control_pb2.PrefillEvent())).join(made)
        answer = lambda _: slowly(tokens_reply(0, [1], is_last=True), control_pb2.GenerateReply())  # noqa: E731
        decoder = await ScriptedWorker(Role.DECODE, answer).join(made)
        await run(made, request(PROMPT, max_tokens=1))
        assert (len(prefill.requests), len(decoder.requests)) == (1, 1)


@pytest.mark.usefixtures("short_silence")
async def test_a_silent_prefill_worker_is_replaced() -> None:
    async with cluster() as made:

        async def beating(message: control_pb2.GenerateRequest) -> AsyncIterator[Any]:
            while message.HasField("handoff"):
                await asyncio.sleep(0.1)
                yield control_pb2.GenerateReply()
            yield tokens_reply(0, [1], is_last=True)

        prefill = await ScriptedWorker(Role.PREFILL, lambda _: forever()).join(made)
        await ScriptedWorker(Role.DECODE, beating).join(made)
        async with asyncio.timeout(3):
            await run(made, request(PROMPT, max_tokens=1))
        assert len(prefill.requests) == 1


@pytest.mark.usefixtures("short_silence")
async def test_a_slow_reader_is_not_taken_for_a_silent_worker() -> None:
    async with cluster() as made:
        worker = await decode(endless).join(made)
        generation = made.dispatcher.generate(request(PROMPT, max_tokens=100_000), 10.0)
        await anext(generation)
        await eventually(lambda: len(generation._outputs._waiting) == 64)
        await asyncio.sleep(0.7)  # longer than silence may last
        assert len(worker.requests) == 1
        assert worker.num_open == 1
        await generation.aclose()


# Choices


async def test_a_stopped_choice_comes_no_more_and_its_worker_is_told() -> None:
    started = asyncio.Event()

    async def both(message: control_pb2.GenerateRequest) -> AsyncIterator[Any]:
        yield tokens_reply(0, [1], choice=0)
        yield tokens_reply(0, [2], choice=1)
        await started.wait()
        yield tokens_reply(1, [3], choice=0)
        yield tokens_reply(1, [4], choice=1, is_last=True)

    async with cluster() as made:
        worker = await decode(both).join(made)
        generation = made.dispatcher.generate(request(PROMPT, max_tokens=5, n=2), 10.0)
        outputs = [await anext(generation), await anext(generation)]
        generation.stop_choice(0)
        generation.stop_choice(0)
        await eventually(lambda: worker.stopped == [(worker.requests[0].request.request_id, 0)])
        started.set()
        outputs += [output async for output in generation]
        assert [(output.choice, output.tokens[0].token_id) for output in outputs] == [(0, 1), (1, 2), (1, 4)]
        await eventually(lambda: worker.num_open == 0)


async def test_a_choice_that_has_ended_gives_nothing_more_either_once_it_is_stopped() -> None:
    async with cluster() as made:
        worker = await decode(says(tokens_reply(0, [1]), tokens_reply(1, [2], is_last=True))).join(made)
        generation = made.dispatcher.generate(request(PROMPT, max_tokens=2), 10.0)
        await anext(generation)
        await eventually(lambda: worker.num_open == 0)
        generation.stop_choice(0)
        assert [output async for output in generation] == []
        assert worker.stopped == []


async def test_when_all_choices_are_stopped_the_generation_ends_and_its_legs_close() -> None:
    async with cluster() as made:
        worker = await decode(lambda _: forever(tokens_reply(0, [1]), tokens_reply(0, [1], choice=1))).join(made)
        generation = made.dispatcher.generate(request(PROMPT, n=2), 10.0)
        await anext(generation)
        generation.stop_choice(1)  # its output waits, and is not given
        generation.stop_choice(0)
        async with asyncio.timeout(5):
            assert [output async for output in generation] == []
        await eventually(lambda: worker.num_open == 0)
        assert not made.fleet._rests.is_resting(worker.info())


async def test_more_outputs_than_seats_come_in_turns_and_equal_those_of_a_larger_worker() -> None:
    async with cluster() as made:
        config = made._config
        small = await made.add(Role.DECODE, config=type(config)(**{**_fields(config), "max_num_seqs": 3}))
        await made.add(Role.PREFILL)
        asked = request(prompt_of(50), max_tokens=6, n=8, seed=11)
        outputs = await run(made, asked, 20.0)
        tokens = collect_tokens(outputs, asked)
        assert tokens == {c: expected_tokens(asked.token_ids, 6, seed=11, choice=c) for c in range(8)}
        assert max(output.num_cached_tokens for output in outputs) == 0  # what an earlier turn left in the cache does not count
        assert small.worker.config.max_num_seqs == 3


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


async def test_turns_have_the_seeds_of_the_whole_request_and_leave_out_what_was_stopped() -> None:
    async with cluster() as made:

        def answer(message: control_pb2.GenerateRequest) -> AsyncIterator[Any]:
            return replies(*(tokens_reply(0, [1], choice=c, is_last=True) for c in range(message.request.sampling.n)))

        worker = await decode(answer, max_num_seqs=2).join(made)
        generation = made.dispatcher.generate(request(PROMPT, max_tokens=1, n=6, seed=3), 10.0)
        generation.stop_choice(3)
        outputs = [output async for output in generation]
        assert [output.choice for output in outputs] == [0, 1, 2, 4, 5]
        samplings = [message.request.sampling for message in worker.requests]
        assert [(s.n, s.seed) for s in samplings] == [(2, 3), (1, choice_seed(3, 2)), (2, choice_seed(3, 4))]


# One model, one revision


async def test_a_continuation_stays_with_the_weights_that_it_began_with() -> None:
    async with cluster() as made:
        first = await decode(says(tokens_reply(0, [1]), then=Unavailable("gone")), digest="old").join(made)
        generation = made.dispatcher.generate(asked := request(PROMPT, max_tokens=2), 10.0)
        outputs = [await anext(generation)]
        new = await decode(says(tokens_reply(1, [9], is_last=True)), digest="new").join(made)
        made.watcher.workers.pop(first.info().worker_id)
        made.fleet.notify_change(first.info().worker_id)
        old = await decode(says(tokens_reply(1, [2], is_last=True)), digest="old").join(made)
        outputs += [output async for output in generation]
        assert collect_tokens(outputs, asked) == {0: [1, 2]}
        assert (len(new.requests), len(old.requests)) == (0, 1)


async def test_when_no_worker_of_its_weights_is_left_the_stream_ends_with_an_error() -> None:
    async with cluster() as made:
        made.dispatcher._worker_wait_s = 0.3
        first = await decode(says(tokens_reply(0, [1]), then=Unavailable("gone")), digest="old").join(made)
        generation = made.dispatcher.generate(request(PROMPT, max_tokens=2), 10.0)
        await anext(generation)
        new = await decode(says(tokens_reply(1, [9], is_last=True)), digest="new").join(made)
        made.watcher.workers.pop(first.info().worker_id)
        made.fleet.notify_change(first.info().worker_id)
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable, match="weights"):
                await anext(generation)
        assert new.requests == []


async def test_before_its_first_token_a_request_may_go_to_other_weights() -> None:
    async with cluster() as made:
        first = await decode(says(then=Unavailable("gone")), digest="old").join(made)
        generation = made.dispatcher.generate(asked := request(PROMPT, max_tokens=1), 10.0)
        reading = asyncio.create_task(anext(generation))
        await eventually(lambda: len(first.requests) > 0)
        await decode(says(tokens_reply(0, [9], is_last=True)), digest="new").join(made)
        assert collect_tokens([await reading], asked) == {0: [9]}


# What a client is told

SECRET = "decode@10.1.2.3:7001"
ERRORS = [
    kind(f"{SECRET} failed at 10.1.2.3:7001")
    for kind in (
        Overloaded, Unavailable, DeadlineExceeded, Cancelled, IncompatiblePeer, StaleTransfer, CorruptTransfer,
        Unauthorized, Internal,
    )
]  # fmt: skip


@pytest.mark.parametrize(
    "error", [*ERRORS, InvalidRequest(SECRET, param="address"), RuntimeError(SECRET)], ids=lambda e: type(e).__name__
)
async def test_no_error_names_a_worker_or_an_address(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as made:
        made.dispatcher._worker_wait_s = 0.5
        worker = await decode(says(then=error)).join(made)
        with caplog.at_level(logging.INFO), pytest.raises(TwostrokeError) as raised:
            await run(made, request(PROMPT))
        text = str(raised.value)
        assert text
        assert not isinstance(raised.value, Unauthorized | Cancelled)
        for secret in ("10.1.2.3", "7001", "127.0.0.1", worker.info().worker_id, worker.info().boot_id):
            assert secret not in text
        assert raised.value.http_status in (429, 500, 503, 504)
        assert worker.info().worker_id in caplog.text


# Retries


async def test_requests_that_cannot_be_served_ask_at_growing_intervals_and_the_log_has_a_line_for_each_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_workers, num_requests, wait_s = 16, 20, 3.0
    async with cluster() as made:
        made.dispatcher._worker_wait_s = wait_s
        refusing = [await decode(says(then=Unavailable("no"))).join(made) for _ in range(num_workers)]
        for worker in refusing:
            made.announce_info(worker.info(), "127.0.0.1:1")  # refused: not reached, so that no request gives up early
        before = num_failures("decode", Unavailable.kind)
        running = [asyncio.create_task(run(made, request(PROMPT))) for _ in range(num_requests)]
        while not all(task.done() for task in running):
            for worker in refusing:  # as often as real heartbeats come, and more
                made.fleet.notify_change(worker.info().worker_id)
            await asyncio.wait(running, timeout=0.1)
        assert all(isinstance(task.exception(), Unavailable) for task in running)
        num_attempts = num_failures("decode", Unavailable.kind) - before
        print(f"{num_attempts / num_requests / wait_s:.1f} attempts per second and request")
        assert num_attempts / num_requests <= 8 + 8  # at once, and then: 0.05, 0.1, 0.2, 0.4, 0.8, 1.6 s, each less up to a half
        assert sum("fails and rests" in record.message for record in caplog.records) == num_workers


async def test_a_worker_that_serves_again_is_said_to(caplog: pytest.LogCaptureFixture) -> None:
    fails = [Unavailable("no"), Unavailable("no"), None]
    async with cluster() as made:

        def answer(_: Any) -> AsyncIterator[Any]:
            error = fails.pop(0)
            return replies(then=error) if error else replies(tokens_reply(0, [1], is_last=True))

        worker = await decode(answer).join(made)
        with caplog.at_level(logging.INFO, "services.router.dispatch.rests"):
            await run(made, request(PROMPT, max_tokens=1))
        lines = [record.message for record in caplog.records if record.name.endswith("rests")]
        assert len(lines) == 2
        assert "rests" in lines[0]
        assert "serves again" in lines[1]
        assert worker.info().worker_id in lines[0]
