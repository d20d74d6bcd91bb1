"""Random traffic over tiny pools: whatever the order of events, each output is what it would be alone, and no block is lost.

Hypothesis draws the limits and a seed; the seed draws arrivals and their interleaving. A failing example is printed with both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.base.block_hash import block_hashes, hash_seed
from shared.base.request import FinishReason, Output, Request, SamplingParams
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Event, Plan, Progress, SampledToken
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.schedule.sequence import Sequence, Status
from tests.support.fake_kv import FakeModel, first_tokens, solo_outputs

NUM_REQUESTS = 14
DIGEST = "digest"


@dataclass(frozen=True)
class Limits:
    block_size: int
    num_usable_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    block_size = draw(st.sampled_from([2, 3, 4, 8]))
    num_usable_blocks = draw(st.integers(4, 24))
    max_num_seqs = draw(st.integers(1, 6))
    return Limits(
        block_size,
        num_usable_blocks,
        max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 24)),
        max_model_len=draw(st.integers(4, block_size * num_usable_blocks)),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )


@dataclass
class Answer:
    """What a client has received of one output."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Flight:
    """A step that has been launched and is computed at some time after that."""

    def __init__(self, model: FakeModel, plan: Plan) -> None:
        self.plan = plan
        self._model = model
        self._launched = model.launch(plan)
        self._samples: list[list[SampledToken]] | None = None

    def compute(self) -> list[list[SampledToken]]:
        if self._samples is None:
            self._samples = self._model.compute(self._launched)
        return self._samples


class Traffic:
    """Clients, prefill workers and decode workers around one scheduler, all driven by one random stream."""

    def __init__(self, limits: Limits, random: Random, looks_ahead: bool) -> None:
        self.limits = limits
        self.looks_ahead = looks_ahead
        self.num_ahead = 0  # steps planned ahead
        self.random = random
        self.blocks = BlockManager(limits.num_usable_blocks + 1, limits.block_size, limits.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            digest=DIGEST,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
        )
        self.model = FakeModel(limits.block_size)
        self.documents = [[random.randrange(5) for _ in range(limits.max_model_len)] for _ in range(2)]
        self.requests: dict[str, Request] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self.progress: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.reserved: list[Sequence] = []
        self.holds: dict[str, Sequence] = {}
        self.arrived: list[Sequence] = []  # added and not yet seen in a plan, in order
        self.index: set[bytes] = set()  # the shared index, as events build it

    # --- events from outside; any of them may come at any time

    def arrive(self) -> None:
        request = self._draw_request()
        self.requests[request.request_id] = request
        for choice in range(request.sampling.n):
            self.answers[request.request_id, choice] = Answer()
        kind = self.random.choice(["local", "local", "hold", "remote"])
        if kind == "remote":
            self.scheduler.reserve(request)
            return
        sequence = Sequence(request, hold=kind == "hold")
        self.scheduler.add(sequence)
        self.arrived.append(sequence)
        if sequence.hold:
            self.holds[sequence.id] = sequence

    def _draw_request(self) -> Request:
        random, longest = self.random, self.limits.max_model_len - 1
        num_tokens = min(longest, random.randint(1, max(2, longest // 2) if random.random() < 0.8 else longest))
        shared = self.random.randint(0, num_tokens)
        token_ids = random.choice(self.documents)[:shared] + [random.randrange(5) for _ in range(num_tokens - shared)]
        num_emitted = random.choice([0, 0, 0, random.randrange(num_tokens)])
        sampling = SamplingParams(
            max_tokens=num_emitted + random.randint(1, 20),
            n=min(random.choice([1, 1, 1, 2, 3, 5]), self.limits.max_num_seqs),
            stop_token_ids=tuple(random.sample(range(12), random.choice([0, 0, 1]))),
        )
        salt = random.choice(["", "", "", "tenant"])
        return Request(f"r{len(self.requests)}", token_ids, num_tokens - num_emitted, sampling, salt)

    def grant(self) -> None:
        for sequence in self.scheduler.grant():
            self.reserved.append(sequence)
            self.model.verify(sequence, sequence.num_computed_tokens)

    def receive_and_commit(self) -> None:
        if not self.reserved:
            return
        sequence = self.reserved.pop(self.random.randrange(len(self.reserved)))
        self.model.write(sequence, sequence.num_computed_tokens, sequence.num_tokens)
        tokens = first_tokens(sequence.token_ids, sequence.request.sampling.n)
        self._deliver(self.scheduler.commit(sequence.id, tokens, sequence.num_cached_tokens))

    def receive_a_part(self) -> None:
        if self.reserved:
            sequence = self.random.choice(self.reserved)
            self.model.write(
                sequence, sequence.num_computed_tokens, self.random.randint(sequence.num_computed_tokens, sequence.num_tokens)
            )

    def ship_and_release(self) -> None:
        held = [sequence for sequence in self.holds.values() if sequence.status is Status.HELD]
        if held:
            sequence = self.random.choice(held)
            self.model.verify(sequence, sequence.num_tokens)
            assert self.progress[sequence.id] == sequence.num_tokens
            self.scheduler.release(sequence.id)

    def abort(self) -> None:
        live = self.scheduler.sequences()
        if live:
            victim = self.random.choice(live).id
            assert self.scheduler.abort(victim)
            assert not self.scheduler.abort(victim)
            self.aborted.add(victim)
            self.reserved = [sequence for sequence in self.reserved if sequence.id != victim]
            self.arrived = [sequence for sequence in self.arrived if sequence.id != victim]

    def drain(self) -> None:
        stored, removed = self.blocks.drain_events()
        assert len(stored) <= self.limits.num_usable_blocks
        assert not self.index & set(stored)
        assert self.index >= set(removed)
        self.index = (self.index | set(stored)) - set(removed)
        assert self.index == set(self.blocks.cached_hashes())

    def disturb(self, aborts: bool) -> None:
        """A few random events."""
        for _ in range(self.random.randrange(3)):
            events = [self.receive_and_commit, self.receive_a_part, self.ship_and_release, self.drain]
            if aborts and self.random.random() < 0.15:
                events = [self.abort]
            if len(self.requests) < NUM_REQUESTS and self.random.random() < 0.5:
                events = [self.arrive]
            self.random.choice(events)()
            self.grant()
            self.check()

    # --- a step

    def step(self, aborts: bool) -> None:
        """One step, or, on a device that is asynchronous, the steps until none can be planned ahead."""
        had_work = self.scheduler.has_work
        preemptions = self._preemptions()
        decodes = self._decodes()
        plan = self.scheduler.schedule()
        self._deliver(list(plan.outputs))
        self.grant()
        self.check()
        preempted = {sequence for sequence, count in self._preemptions().items() if count > preemptions.get(sequence, 0)}
        assert had_work == bool(plan.scheduled or preempted), "work, but nothing scheduled, or the reverse"
        self._check_plan(plan, decodes)
        flight = Flight(self.model, plan) if plan.scheduled else None
        while flight is not None:
            self.disturb(aborts)
            ahead = self._look_ahead()
            self.disturb(aborts)
            if aborts and self.random.random() < 0.1:
                self._fail(flight, ahead)
                return
            samples = flight.compute()
            if ahead is not None and self.random.random() < 0.5:
                ahead.compute()
            self.disturb(aborts)
            self._deliver(self.scheduler.update(flight.plan, samples))
            self.grant()
            self.check()
            flight = ahead

    def _look_ahead(self) -> Flight | None:
        plan = self.scheduler.schedule_ahead() if self.looks_ahead else None
        self.check()
        if plan is None:
            return None
        self.num_ahead += 1
        assert all(item.sequence.status is Status.RUNNING for item in plan.scheduled)
        assert plan.num_tokens == len(plan.scheduled) <= self.limits.max_num_seqs
        return Flight(self.model, plan)

    def _fail(self, flight: Flight, ahead: Flight | None) -> None:
        """The model fails, before or after it has made the copies and written its blocks."""
        if self.random.random() < 0.5:
            for launched in (flight, ahead):
                if launched is not None:
                    launched.compute()
        self.scheduler.discard(flight.plan)
        self.grant()
        self.check()

    def _check_plan(self, plan: Plan, decodes: list[Sequence]) -> None:
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        sizes = [item.num_tokens for item in plan.scheduled]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "single tokens do not come first"
        planned = [item.sequence for item in plan.scheduled]
        assert len(set(planned)) == len(planned) <= self.limits.max_num_seqs
        assert all(sequence.status is Status.RUNNING for sequence in planned)
        for decode in decodes:
            assert decode in planned or decode.status is Status.WAITING, "a decode waits although it was not preempted"
        assert sum(s.request.sampling.n if s.is_forking and not s.hold else 1 for s in planned) <= self.limits.max_num_seqs
        newcomers = [sequence for sequence in self.arrived if sequence in planned]
        assert newcomers == self.arrived[: len(newcomers)], "the queue was overtaken"
        self.arrived = self.arrived[len(newcomers) :]
        if newcomers:
            in_line = (Status.WAITING, Status.ASKING, Status.COMMITTED)
            waiting = [s for s in self.scheduler.sequences() if s.status in in_line]
            assert all(s.order > newcomers[-1].order for s in waiting), "one who came earlier was overtaken"

    def _decodes(self) -> list[Sequence]:
        running = [sequence for sequence in self.scheduler.sequences() if sequence.status is Status.RUNNING]
        return [sequence for sequence in running if sequence.num_uncomputed_tokens == 1]

    def _preemptions(self) -> dict[Sequence, int]:
        return {sequence: sequence.num_preemptions for sequence in self.scheduler.sequences()}

    # --- what clients see, and what must always hold

    def _deliver(self, events: list[Event] | list[Output]) -> None:
        for event in events:
            if isinstance(event, Progress):
                assert event.num_computed_tokens > self.progress.get(event.request_id, 0)
                self.progress[event.request_id] = event.num_computed_tokens
            elif isinstance(event, Output):
                self._deliver_output(event)

    def _deliver_output(self, output: Output) -> None:
        assert output.request_id not in self.aborted, "output after an abort"
        request, answer = self.requests[output.request_id], self.answers[output.request_id, output.choice]
        assert answer.finish_reason is None, "output after the end"
        for token in output.tokens:
            assert token.index == request.num_emitted + len(answer.tokens), "a gap or a repetition"
            answer.tokens.append(token.token_id)
        answer.finish_reason = output.finish_reason

    def check(self) -> None:
        self.scheduler.check()
        for sequence in self.scheduler.sequences():
            known = block_hashes(hash_seed(DIGEST, sequence.request.cache_salt), sequence.token_ids, self.limits.block_size)
            assert sequence.block_hashes == known[: len(sequence.block_hashes)]

    def check_answers(self) -> None:
        for request in self.requests.values():
            for choice, (tokens, reason) in enumerate(solo_outputs(request, self.limits.max_model_len)):
                answer = self.answers[request.request_id, choice]
                if request.request_id in self.holds:
                    tokens = tokens[:1]
                    reason = reason if answer.finish_reason else None
                if request.request_id in self.aborted:
                    assert answer.tokens == tokens[: len(answer.tokens)]
                else:
                    assert (answer.tokens, answer.finish_reason) == (tokens, reason), request.request_id

    def most_steps_left(self) -> int:
        """Every step either computes a token that counts or one that was lost in a preemption; the latter are bounded by the length
        of what the oldest sequence still has to produce."""
        outputs = sum(request.sampling.max_tokens * request.sampling.n for request in self.requests.values())
        return 100 + 10 * (outputs + sum(len(request.token_ids) for request in self.requests.values()))


def run_to_the_end(traffic: Traffic, aborts: bool) -> None:
    while len(traffic.requests) < NUM_REQUESTS:
        traffic.disturb(aborts)
        traffic.step(aborts)
    for _ in range(traffic.most_steps_left()):
        if not traffic.scheduler.sequences():
            break
        traffic.disturb(aborts=False)
        traffic.step(aborts=False)
    else:
        raise AssertionError(f"starved: {[(s.id, s.status) for s in traffic.scheduler.sequences()]}")
    traffic.check_answers()
    traffic.drain()
    assert traffic.blocks.num_free_blocks == traffic.limits.num_usable_blocks
    assert (traffic.scheduler.num_running, traffic.scheduler.num_waiting, traffic.scheduler.num_waiting_tokens) == (0, 0, 0)


SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@SETTINGS
@given(limits(), st.integers(0, 2**32), st.booleans())
def test_every_request_gets_its_own_output_and_all_blocks_come_back(limits: Limits, seed: int, looks_ahead: bool) -> None:
    run_to_the_end(Traffic(limits, Random(seed), looks_ahead), aborts=False)


@SETTINGS
@given(limits(), st.integers(0, 2**32), st.booleans())
def test_aborts_and_failed_steps_at_any_moment_disturb_nobody_else_and_all_blocks_come_back(
    limits: Limits, seed: int, looks_ahead: bool
) -> None:
    run_to_the_end(Traffic(limits, Random(seed), looks_ahead), aborts=True)


def test_random_traffic_looks_ahead_at_all() -> None:
    traffic = Traffic(Limits(4, 24, 4, 12, 90, True), Random(1), looks_ahead=True)
    run_to_the_end(traffic, aborts=True)
    assert traffic.num_ahead > 20
