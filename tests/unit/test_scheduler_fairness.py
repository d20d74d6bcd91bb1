"""Seats and blocks go by arrival: under endless handoffs, whatever else comes is served within twice the time of a plain queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.base.request import Output, Request, SamplingParams
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import SampledToken
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.schedule.sequence import Sequence, Status

BLOCK_SIZE = 4
NUM_SEATS = 4
NUM_CLIENTS = 2 * NUM_SEATS
MAX_MODEL_LEN = 64


def request_of(name: str, num_tokens: int, max_tokens: int, num_emitted: int = 0, n: int = 1) -> Request:
    token_ids = [hash((position, *name.encode())) % 1000 for position in range(num_tokens)]
    return Request(name, token_ids, num_tokens - num_emitted, SamplingParams(max_tokens=num_emitted + max_tokens, n=n))


class ClosedLoop:
    """Clients whose prompts are prefilled elsewhere, each with a new request as soon as the last one has ended."""

    def __init__(
        self,
        num_blocks: int = 400,
        random: Random | None = None,
        num_clients: int = NUM_CLIENTS,
        num_seats: int = NUM_SEATS,
    ) -> None:
        self.blocks = BlockManager(num_blocks + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.blocks, digest="d", max_num_seqs=num_seats, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN
        )
        self.num_steps = 0
        self.ended: dict[str, int] = {}  # request: when
        self.emitted_at: dict[tuple[str, int], list[int]] = {}  # output: when each of its tokens came
        self._random = random
        self._names = count()
        self._to_commit: list[tuple[int, Sequence]] = []  # when, whom
        for _ in range(num_clients):
            self._ask()

    def _ask(self) -> None:
        lengths = (12, 16) if self._random is None else (self._random.randint(1, 30), self._random.randint(1, 30))
        self.scheduler.reserve(request_of(f"handoff-{next(self._names)}", *lengths))

    def step(self) -> None:
        self.num_steps += 1
        delay = 2 if self._random is None else self._random.randint(0, 5)
        self._to_commit += [(self.num_steps + delay, sequence) for sequence in self.scheduler.grant()]
        due = [sequence for at, sequence in self._to_commit if at <= self.num_steps]
        self._to_commit = [(at, sequence) for at, sequence in self._to_commit if at > self.num_steps]
        for sequence in due:
            self._take(self.scheduler.commit(sequence.id, [SampledToken(7)], 0))
        plan = self.scheduler.schedule()
        self._take(list(plan.outputs))
        if plan.scheduled:
            events = self.scheduler.update(plan, [[SampledToken(7)] * item.num_samples for item in plan.scheduled])
            self._take([event for event in events if isinstance(event, Output)])
        self.scheduler.check()

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.emitted_at.setdefault((output.request_id, output.choice), []).append(self.num_steps)
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.num_steps
                if output.request_id.startswith("handoff"):
                    self._ask()

    def steps_until_end(self, request_id: str, most: int = 3000) -> int:
        begin = self.num_steps
        while request_id not in self.ended:
            self.step()
            assert self.num_steps - begin < most, f"{request_id} starves"
        return self.num_steps - begin

    def steps_in_arrival_order(self, own_steps: int) -> int:
        """Of a request that comes now, in a plain queue: those before it take the seats as they become free."""

        def steps_left(sequence: Sequence) -> int:
            return sequence.request.sampling.max_tokens - sequence.num_output_tokens

        live = self.scheduler.sequences()
        free_at = [steps_left(s) for s in live if s.status is Status.RUNNING]
        free_at += [0] * (NUM_SEATS - len(free_at))
        heapq.heapify(free_at)
        for sequence in live:
            if sequence.status is not Status.RUNNING:
                heapq.heappush(free_at, heapq.heappop(free_at) + steps_left(sequence))
        return heapq.heappop(free_at) + own_steps


def local(loop: ClosedLoop) -> Request:
    return request_of("local", 8, 10)


def continuation(loop: ClosedLoop) -> Request:
    return request_of("continued", 20, 10, num_emitted=9)


@pytest.mark.parametrize("kind", [local, continuation])
def test_a_request_among_twice_as_many_handoffs_as_seats_ends_within_twice_the_time_of_a_plain_queue(
    kind: Callable[[ClosedLoop], Request],
) -> None:
    loop = ClosedLoop()
    for _ in range(50):
        loop.step()
    assert loop.scheduler.num_running == NUM_SEATS
    request = kind(loop)
    allowed = 2 * loop.steps_in_arrival_order(own_steps=10)
    loop.scheduler.add(Sequence(request))
    assert loop.steps_until_end(request.request_id) <= allowed


def test_a_preempted_sequence_returns_before_all_handoffs_that_came_after_it() -> None:
    loop = ClosedLoop()
    loop.scheduler.add(Sequence(request_of("own", 6, 20, n=2)))
    while len(loop.emitted_at.get(("own", 1), [])) < 1:
        loop.step()
    plan = loop.scheduler.schedule()
    assert plan.copies
    loop.scheduler.discard(plan)  # the one whose block was to be copied starts over
    (preempted,) = [s for s in loop.scheduler.sequences() if s.num_preemptions]
    loop.step()
    assert preempted.status is Status.RUNNING
    assert loop.steps_until_end("own") <= 2 * 20


def test_a_stream_that_has_begun_gets_a_token_in_every_step() -> None:
    loop = ClosedLoop()
    for _ in range(300):
        loop.step()
    assert len(loop.emitted_at) > 50
    for name, moments in loop.emitted_at.items():
        assert moments == list(range(moments[0], moments[0] + len(moments))) or moments[1:] == list(
            range(moments[0], moments[0] + len(moments) - 1)
        ), name  # a handed-over one gets its second token in the step that gives it its seat


def test_handoffs_are_not_held_back_by_an_endless_line_of_local_requests() -> None:
    loop = ClosedLoop(num_blocks=24, num_clients=0)
    names = count()
    for _ in range(40):
        loop.scheduler.add(Sequence(request_of(f"local-{next(names)}", 16, 6)))
    loop.scheduler.reserve(request_of("handed over", 12, 4))
    for _ in range(400):
        loop.scheduler.add(Sequence(request_of(f"local-{next(names)}", 16, 6)))
        loop.step()
        if "handed over" in loop.ended:
            break
    served = [name for name in loop.ended if name.startswith("local")]
    assert "handed over" in loop.ended
    assert all(int(name.removeprefix("local-")) < 40 + NUM_SEATS for name in served)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(16, 60), st.integers(0, 12), st.integers(0, 2**32))
def test_nothing_starves_whatever_the_seats_the_pool_and_the_handoffs(
    num_seats: int, num_blocks: int, num_clients: int, seed: int
) -> None:
    random = Random(seed)
    loop = ClosedLoop(num_blocks, random, num_clients, num_seats)
    for _ in range(60):
        loop.step()
    loop.scheduler.add(Sequence(request_of("local", random.randint(1, 50), random.randint(1, 13))))
    assert loop.steps_until_end("local") < 100 * (num_clients + 1)
