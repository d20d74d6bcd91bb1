"""The engine over a device that is asynchronous: it always has the next step, and everything else is as it was without."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import pytest

from shared.base.request import FinishReason, Output, Request
from shared.base.worker_info import Role
from shared.engine import metrics
from shared.engine.compute.sampler import NotFiniteLogits
from shared.engine.engine import Engine
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Event, Failure, Plan
from shared.engine.schedule.scheduler import Scheduler
from tests.support.cluster import Cluster, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import FakeAsyncRunner, FakeRunner, expected_tokens

NUM_BLOCKS = 40
TIMEOUT_S = 20


class Driven:
    """An engine and what it says."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.blocks = BlockManager(NUM_BLOCKS, runner.pool.geometry.block_size)
        self.scheduler = Scheduler(self.blocks, digest="d", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=500)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.failed: set[str] = set()
        self._tokens: dict[str, list[int]] = {}
        self._reasons: dict[str, FinishReason] = {}
        self.engine = Engine(runner, self.scheduler, self.listen)

    def listen(self, events: object) -> None:
        for event in events:  # type: ignore[attr-defined]
            self.events.put(event)

    def submit(self, *requests: Request) -> None:
        """All at once, so that they are in one step."""
        with self.engine._wake:
            for asked in requests:
                self.engine.submit(asked)

    def next_event(self) -> Event:
        event = self.events.get(timeout=TIMEOUT_S)
        if isinstance(event, Failure):
            self.failed.add(event.request_id)
        elif isinstance(event, Output):
            assert event.request_id not in self._reasons, "output after the end"
            self._tokens.setdefault(event.request_id, []).extend(t.token_id for t in event.tokens)
            if event.finish_reason is not None:
                self._reasons[event.request_id] = event.finish_reason
        return event

    def tokens_of(self, asked: Request) -> list[int]:
        while asked.request_id not in self._reasons:
            self.next_event()
        return self._tokens[asked.request_id]

    def outcome(self, asked: Request) -> Failure:
        while not isinstance(event := self.next_event(), Failure) or event.request_id != asked.request_id:
            pass
        return event

    def next_launch(self) -> Plan:
        assert isinstance(self.runner, FakeAsyncRunner)
        return self.runner.launches.get(timeout=TIMEOUT_S)


@contextmanager
def driven(runner: FakeRunner | None = None, permits: int | None = None) -> Iterator[Driven]:
    """A running engine. With `permits` its device computes no more than so many steps, until it is given more."""
    made = Driven(runner or FakeAsyncRunner(NUM_BLOCKS))
    if permits is not None:
        assert isinstance(made.runner, FakeAsyncRunner)
        made.runner.permits = threading.Semaphore(permits)
    made.engine.start()
    try:
        yield made
    finally:
        if isinstance(made.runner, FakeAsyncRunner):
            allow(made, 1000)
            made.engine.stop()
            made.runner.close()
        else:
            made.engine.stop()
        made.engine.check()
        if not made.scheduler.sequences():
            assert made.blocks.num_free_blocks == made.blocks.num_usable_blocks


def allow(made: Driven, num_steps: int) -> None:
    assert isinstance(made.runner, FakeAsyncRunner)
    if made.runner.permits is not None:
        made.runner.permits.release(num_steps)


def stop_after(prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    """A token at which the output ends by itself, at the latest after so many tokens."""
    return (expected_tokens(prompt, num_tokens)[-1],)


def upto_stop(prompt: list[int], stop: tuple[int, ...], most: int) -> list[int]:
    tokens = expected_tokens(prompt, most)
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stop), most)]


def test_the_next_step_is_launched_while_the_device_is_at_the_one_before() -> None:
    asked = request(prompt_of(20), max_tokens=4)
    with driven(permits=0) as made:
        made.submit(asked)
        assert made.next_launch().sampled_rows is None
        assert made.next_launch().sampled_rows == (0,)
        assert made.runner.num_steps == 0
        for _ in range(2):
            allow(made, 1)
            made.next_event()
            made.next_launch()
        allow(made, 2)
        assert made.tokens_of(asked) == expected_tokens(asked.token_ids, 4)


def test_a_device_that_is_not_asynchronous_gets_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(prompt_of(20), max_tokens=6)
    with driven(FakeRunner(NUM_BLOCKS)) as made:
        monkeypatch.delattr(Scheduler, "schedule_ahead")
        made.submit(asked)
        assert made.tokens_of(asked) == expected_tokens(asked.token_ids, 6)


def test_an_output_ends_at_its_stop_token_although_a_step_further_was_launched() -> None:
    prompts = [prompt_of(20, start) for start in (0, 1, 2)]
    asked = [
        request(prompt, max_tokens=40, stop_token_ids=stop_after(prompt, n)) for prompt, n in zip(prompts, (3, 7, 12), strict=True)
    ]
    with driven() as made:
        made.submit(*asked)
        for prompt, one in zip(prompts, asked, strict=True):
            assert made.tokens_of(one) == upto_stop(prompt, one.sampling.stop_token_ids, 40)


def test_an_abort_while_two_steps_are_under_way_ends_one_request_and_no_other() -> None:
    leaving, staying = request(prompt_of(20), max_tokens=30), request(prompt_of(30, 5), max_tokens=10)
    with driven(permits=0) as made:
        made.submit(leaving, staying)
        made.next_launch()
        made.next_launch()
        num_free = made.engine.load().num_free_blocks
        assert made.engine.abort(leaving.request_id)
        assert made.engine.load().num_free_blocks == num_free  # the device may still write to them
        made.engine.check()
        allow(made, 1000)
        assert made.tokens_of(staying) == expected_tokens(staying.token_ids, 10)
        assert leaving.request_id not in made._tokens


def test_logits_that_are_not_finite_end_one_request_and_the_others_tokens_are_computed_again() -> None:
    bad, good = request(prompt_of(20), max_tokens=30), request(prompt_of(30, 5), max_tokens=10)
    with driven(permits=0) as made:
        made.submit(bad, good)
        made.next_launch()
        made.next_launch()
        made.runner.fail_next = NotFiniteLogits([bad.request_id])
        allow(made, 1000)
        assert isinstance(made.outcome(bad).error, NotFiniteLogits)
        assert made.tokens_of(good) == expected_tokens(good.token_ids, 10)


def test_logits_that_are_not_finite_after_the_end_of_their_output_are_nobodys_failure() -> None:
    prompt = prompt_of(20)
    ended, other = request(prompt, max_tokens=30, stop_token_ids=stop_after(prompt, 1)), request(prompt_of(9), max_tokens=12)
    with driven(permits=0) as made:
        made.submit(ended, other)
        made.next_launch()
        made.next_launch()
        allow(made, 1)
        assert made.tokens_of(ended) == expected_tokens(prompt, 1)
        made.runner.fail_next = NotFiniteLogits([ended.request_id])
        allow(made, 1000)
        assert made.tokens_of(other) == expected_tokens(other.token_ids, 12)
        assert made.failed == set()


def test_a_step_that_fails_ends_its_requests_and_the_next_request_is_served() -> None:
    asked, later = request(prompt_of(20), max_tokens=30), request(prompt_of(30, 5), max_tokens=10)
    with driven(permits=0) as made:
        made.submit(asked)
        made.next_launch()
        made.next_launch()
        made.runner.fail_next = RuntimeError("device lost")
        allow(made, 1000)
        assert "step failed" in str(made.outcome(asked).error)
        made.submit(later)
        assert made.tokens_of(later) == expected_tokens(later.token_ids, 10)


def test_a_step_that_cannot_be_launched_ahead_fails_after_the_tokens_of_the_one_before() -> None:
    asked, later = request(prompt_of(20), max_tokens=30), request(prompt_of(30, 5), max_tokens=10)
    runner = FakeAsyncRunner(NUM_BLOCKS)
    runner.fail_launch_ahead = RuntimeError("no memory")
    with driven(runner) as made:
        made.submit(asked)
        assert "step failed" in str(made.outcome(asked).error)
        assert made._tokens[asked.request_id] == expected_tokens(asked.token_ids, 1)
        made.submit(later)
        assert made.tokens_of(later) == expected_tokens(later.token_ids, 10)


def test_a_stop_waits_for_the_steps_that_have_been_launched_and_launches_no_more() -> None:
    with driven(permits=0) as made:
        made.submit(request(prompt_of(20), max_tokens=30))
        made.next_launch()
        made.next_launch()
        stopping = threading.Thread(target=made.engine.stop)
        stopping.start()
        while not made.engine._stopping:
            stopping.join(0.01)
        allow(made, 1000)
        stopping.join(TIMEOUT_S)
        assert not stopping.is_alive()
        assert made.runner.num_steps == 2
        assert isinstance(made.runner, FakeAsyncRunner)
        assert made.runner.launches.empty()


class Recorder:
    """Stands for the watchdog."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def begin(self, num_tokens: int) -> None:
        self.calls.append("begin")

    def end(self, num_tokens: int, step_s: float) -> None:
        assert step_s >= 0
        self.calls.append("end")


def test_the_watchdog_sees_one_step_at_a_time() -> None:
    asked = request(prompt_of(20), max_tokens=9)
    made = Driven(FakeAsyncRunner(NUM_BLOCKS))
    made.engine._watchdog = recorder = Recorder()  # type: ignore[assignment]
    made.engine.start()
    made.submit(asked)
    made.tokens_of(asked)
    made.engine.stop()
    made.runner.close()  # type: ignore[attr-defined]
    assert recorder.calls == ["begin", "end"] * 9


@pytest.mark.parametrize("kind", [FakeRunner, FakeAsyncRunner])
def test_what_the_host_does_beside_a_step_under_way_is_no_overhead(kind: type[FakeRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener takes its time after every step: the device waits for it only if it has nothing to do."""
    overheads: list[float] = []
    monkeypatch.setattr(metrics, "observe_step", lambda plan, times, num_preempted: overheads.append(times.overhead_s))
    asked, work_s, num_tokens = request(prompt_of(20), max_tokens=6), 0.05, 6
    made = Driven(kind(NUM_BLOCKS))

    def listen(events: object) -> None:
        time.sleep(work_s)
        made.listen(events)

    made.engine._listener = listen
    made.engine.start()
    made.submit(asked)
    made.tokens_of(asked)
    made.engine.stop()
    if isinstance(made.runner, FakeAsyncRunner):
        made.runner.close()
    assert len(overheads) == num_tokens
    assert sum(overhead >= work_s for overhead in overheads) == (num_tokens if kind is FakeRunner else 1)


def test_gauges_of_an_idle_engine_tell_what_was_given_back_after_its_last_step() -> None:
    gauges = (metrics.kv_usage, metrics.running, metrics.waiting)
    held, granted = request(prompt_of(40), max_tokens=5), threading.Event()
    with driven(FakeRunner(NUM_BLOCKS)) as made:
        made.engine.submit(held, hold=True)
        while made.engine.num_reserved_and_held() != (0, 1):
            made.next_event()
        made.engine.reserve(request(prompt_of(499, 5)), lambda sequence: granted.set())
        assert granted.wait(TIMEOUT_S)
        made.engine.reserve(asking := request(prompt_of(499, 5)), lambda sequence: None)
        assert [gauge._value.get() for gauge in gauges] == [pytest.approx((3 + 32) / (NUM_BLOCKS - 1)), 0, 1]
        made.engine.release(held.request_id)
        made.engine.abort(asking.request_id)
        assert [gauge._value.get() for gauge in gauges] == [pytest.approx(32 / (NUM_BLOCKS - 1)), 0, 0]
        for sequence in made.scheduler.sequences():
            made.engine.abort(sequence.id)
        assert [gauge._value.get() for gauge in gauges] == [0, 0, 0]


def test_an_abort_of_a_reservation_grants_the_next_one_without_a_step() -> None:
    with driven(FakeRunner(NUM_BLOCKS)) as made:
        granted: list[str] = []
        asked = [request(prompt_of(499, start), max_tokens=1) for start in range(3)]
        for one in asked:
            made.engine.reserve(one, lambda sequence: granted.append(sequence.id))
        assert granted == [asked[0].request_id]
        made.engine.abort(asked[1].request_id)  # one that asks: its callback is forgotten
        assert made.engine.abort(asked[0].request_id)
        assert granted == [asked[0].request_id, asked[2].request_id]
        assert not made.engine._on_grant
        assert made.engine.load().num_steps == 0
        made.engine.abort(asked[2].request_id)


async def client(made: Cluster, rng: random.Random) -> None:
    """Sends a request that may end by a stop token, and may leave early; what comes must be right."""
    prompt = prompt_of(rng.randint(1, 60), rng.randrange(50))
    stop = rng.choice([(), stop_after(prompt, rng.randint(1, 20))])
    asked = request(prompt, max_tokens=rng.randint(1, 30), stop_token_ids=stop)
    expected = upto_stop(prompt, stop, asked.sampling.max_tokens)
    num_wanted = rng.randint(1, 30) if rng.random() < 0.3 else len(expected)
    tokens: list[int] = []
    async with aclosing(made.dispatcher.generate(asked, 30.0)) as outputs:
        async for output in outputs:
            tokens += [token.token_id for token in output.tokens]
            if len(tokens) >= num_wanted:
                break
    assert tokens == expected[: len(tokens)]
    assert len(tokens) >= min(num_wanted, len(expected))


async def test_storm_of_handoffs_to_an_asynchronous_decode_worker_gives_exact_tokens_and_all_blocks_come_back() -> None:
    rng = random.Random(3)
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL, num_blocks=48)
        decode = await made.add(Role.DECODE, runner=FakeAsyncRunner(32))
        await asyncio.gather(*(client(made, random.Random(rng.random())) for _ in range(60)))
        for worker in (prefill, decode):
            await eventually(worker.is_idle)
            worker.check_baseline()
        plans = [decode.runner.launches.get() for _ in range(decode.runner.launches.qsize())]  # type: ignore[attr-defined]
        assert sum(plan.sampled_rows is not None for plan in plans) > 20
