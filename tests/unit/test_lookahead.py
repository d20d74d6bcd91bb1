"""Which steps can be planned ahead of the samples they need, and what becomes of sequences that end meanwhile."""

from __future__ import annotations

import pytest

from shared.base.request import FinishReason, Output, Request, SamplingParams
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Plan, SampledToken
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.schedule.sequence import Sequence, Status

BLOCK_SIZE = 4
STOP, OTHER = 2, 7
MAX_MODEL_LEN = 40


class Engine:
    """A scheduler whose samples the test chooses."""

    def __init__(self, num_usable_blocks: int = 40, max_num_seqs: int = 3) -> None:
        self.scheduler = Scheduler(
            BlockManager(num_usable_blocks + 1, BLOCK_SIZE),
            digest="d",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16,
            max_model_len=MAX_MODEL_LEN,
        )

    def add(self, name: str, num_tokens: int = 5, hold: bool = False, **sampling: object) -> Sequence:
        params = SamplingParams(**{"max_tokens": 20, "stop_token_ids": (STOP,)} | sampling)  # type: ignore[arg-type]
        sequence = Sequence(Request(name, list(range(100, 100 + num_tokens)), num_tokens, params), hold=hold)
        self.scheduler.add(sequence)
        return sequence

    def reserve(self, name: str, num_tokens: int) -> None:
        sequence = self.scheduler.reserve(Request(name, list(range(num_tokens)), num_tokens, SamplingParams()))
        assert self.scheduler.grant() == [sequence]

    def update(self, plan: Plan, *token_ids: int) -> list[Output]:
        samples = [[SampledToken(token_id)] for token_id in token_ids or [OTHER] * len(plan.scheduled)]
        events = self.scheduler.update(plan, samples)
        self.scheduler.check()
        return [event for event in events if isinstance(event, Output)]

    def ahead(self) -> Plan | None:
        plan = self.scheduler.schedule_ahead()
        self.scheduler.check()
        return plan


def names(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [item.sequence.id for item in plan.scheduled]


def test_a_decode_goes_on_with_the_token_that_the_step_in_flight_samples() -> None:
    engine = Engine()
    engine.add("a", num_tokens=5)
    engine.add("b", num_tokens=6)
    prompts = engine.scheduler.schedule()
    ahead = engine.ahead()
    assert ahead is not None
    assert [(s.sequence.id, s.start, s.num_tokens, s.num_samples) for s in ahead.scheduled] == [("a", 5, 1, 1), ("b", 6, 1, 1)]
    assert ahead.sampled_rows == (0, 1)
    assert [output.tokens[0].index for output in engine.update(prompts)] == [0, 0]
    further = engine.ahead()
    assert further is not None
    assert [s.start for s in further.scheduled] == [6, 7]
    assert [output.tokens[0].index for output in engine.update(ahead)] == [1, 1]


def test_a_sequence_that_may_end_by_its_token_is_taken_along_and_keeps_its_blocks_until_that_step_is_done() -> None:
    engine = Engine()
    a = engine.add("a", num_tokens=4)
    engine.add("b", num_tokens=4)
    num_free = engine.scheduler.blocks.num_free_blocks
    plan, ahead = engine.scheduler.schedule(), engine.ahead()
    assert names(ahead) == ["a", "b"]
    assert engine.update(plan, STOP, OTHER)[0].finish_reason is FinishReason.STOP
    assert a.status is Status.FINISHED
    assert len(a.block_table) == 2  # its token's K and V are being written to the second one
    last = engine.ahead()
    assert (names(last), last and last.sampled_rows) == (["b"], (1,))
    assert [output.request_id for output in engine.update(ahead, OTHER, OTHER)] == ["b"]
    assert a.block_table == []
    assert engine.scheduler.blocks.num_free_blocks == num_free - 2
    # Only the block that the prompt filled can be found, not the one with the token that nobody asked for.
    assert len(engine.scheduler.blocks.cached_hashes()) == 1


@pytest.mark.parametrize("sampling", [{"max_tokens": 2}, {"max_tokens": 100, "num_tokens": MAX_MODEL_LEN - 2}])
def test_a_sequence_whose_last_token_it_is_by_its_limits_is_left_out(sampling: dict[str, int]) -> None:
    engine = Engine()
    engine.add("a", num_tokens=3)
    engine.update(engine.scheduler.schedule())
    engine.add("b", **sampling)  # type: ignore[arg-type]
    while (plan := engine.scheduler.schedule()) and any(s.num_samples == 0 for s in plan.scheduled):
        engine.scheduler.update(plan, [[SampledToken(OTHER)] * s.num_samples for s in plan.scheduled])
    first = engine.ahead()
    assert names(first) == ["a", "b"]
    engine.update(plan)
    second = engine.ahead()
    assert (names(second), second and second.sampled_rows) == (["a"], (0,))
    assert engine.update(first)[1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "options",
    [{"n": 2}, {"hold": True}, {"num_tokens": 20}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}],
    ids=["forks", "held", "unfinished prompt", "penalty over output", "penalty over all"],
)
def test_what_hangs_on_more_than_where_the_next_token_goes_makes_the_next_step_wait(options: dict[str, object]) -> None:
    engine = Engine()
    engine.add("a")
    engine.update(engine.scheduler.schedule())
    engine.add("b", **options)  # type: ignore[arg-type]
    engine.scheduler.schedule()
    assert engine.ahead() is None


def test_a_bias_and_masked_stop_tokens_do_not() -> None:
    engine = Engine()
    engine.add("a", logit_bias={4: 1.0}, min_tokens=5)
    engine.scheduler.schedule()
    assert names(engine.ahead()) == ["a"]


def test_the_next_step_waits_for_whoever_can_join_it() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a")
    plan = engine.scheduler.schedule()
    engine.add("b")
    assert engine.ahead() is None
    engine.update(plan)
    plan = engine.scheduler.schedule()
    engine.add("c")  # finds no seat
    assert names(engine.ahead()) == ["a", "b"]
    engine.update(plan)


def test_the_next_step_waits_where_a_sequence_that_ends_makes_room_for_one_in_the_queue() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", max_tokens=1)
    engine.add("b")
    plan = engine.scheduler.schedule()
    assert engine.ahead() is None
    engine.update(plan)
    assert names(engine.scheduler.schedule()) == ["b"]


def test_the_next_step_waits_for_a_committed_reservation() -> None:
    engine = Engine()
    engine.add("a")
    engine.update(engine.scheduler.schedule())
    engine.reserve("r", 3)
    plan = engine.scheduler.schedule()
    engine.scheduler.commit("r", [SampledToken(OTHER)], 0)
    assert engine.ahead() is None
    engine.update(plan)
    assert names(engine.scheduler.schedule()) == ["a", "r"]


@pytest.mark.parametrize("kind", ["waiting", "committed"])
def test_the_next_step_waits_where_one_of_several_ends_and_another_takes_its_seat(kind: str) -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a", max_tokens=2)
    engine.add("b")
    engine.update(engine.scheduler.schedule())
    if kind == "waiting":
        engine.add("c")
    else:
        engine.reserve("c", 3)
        assert engine.scheduler.commit("c", [SampledToken(OTHER)], 0) == []
    plan = engine.scheduler.schedule()
    assert engine.ahead() is None
    engine.update(plan)
    assert names(engine.scheduler.schedule()) == ["b", "c"]


def test_the_next_step_does_not_wait_for_a_committed_sequence_that_finds_no_seat() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a")
    engine.reserve("c", 3)
    plan = engine.scheduler.schedule()
    engine.scheduler.commit("c", [SampledToken(OTHER)], 0)
    assert names(engine.ahead()) == ["a"]
    engine.update(plan)


def test_the_next_step_waits_for_a_committed_sequence_once_the_seats_kept_from_it_are_free() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add("a")
    engine.add("first", n=2)  # keeps both seats, of which one is taken
    engine.reserve("c", 3)
    plan = engine.scheduler.schedule()
    assert engine.scheduler.commit("c", [SampledToken(OTHER)], 0) == []
    ahead = engine.ahead()
    assert names(ahead) == ["a"]
    engine.update(plan)
    engine.scheduler.abort("first")
    assert engine.ahead() is None
    assert ahead is not None
    engine.update(ahead)
    assert names(engine.scheduler.schedule()) == ["a", "c"]


def test_nothing_is_planned_ahead_that_would_take_a_preemption() -> None:
    engine = Engine(num_usable_blocks=10)
    engine.add("a", num_tokens=12)
    engine.update(engine.scheduler.schedule())
    for name, num_tokens in (("r", 16), ("s", 4)):  # one free block is left
        engine.reserve(name, num_tokens)
    plan, starts = engine.scheduler.schedule(), []
    while (ahead := engine.ahead()) is not None:
        engine.update(plan)
        starts.append(ahead.scheduled[0].start)
        plan = ahead
    assert starts == [13, 14, 15, 16, 17, 18, 19]
    assert engine.scheduler.num_preemptions == 0


def test_an_aborted_sequence_keeps_its_blocks_until_both_steps_are_done() -> None:
    engine = Engine()
    a = engine.add("a")
    engine.add("b")
    plan, ahead = engine.scheduler.schedule(), engine.ahead()
    assert engine.scheduler.abort("a")
    engine.scheduler.check()
    assert [output.request_id for output in engine.update(plan)] == ["b"]
    assert a.block_table
    assert [output.request_id for output in engine.update(ahead or plan)] == ["b"]
    assert a.block_table == []


def test_a_failed_step_takes_the_one_made_ahead_with_it_and_the_tokens_are_due_again() -> None:
    engine = Engine()
    a, b = engine.add("a", num_tokens=4), engine.add("b", num_tokens=4)
    engine.update(engine.scheduler.schedule())
    plan = engine.scheduler.schedule()
    assert engine.ahead() is not None
    engine.scheduler.abort("a")
    engine.scheduler.discard(plan)
    engine.scheduler.check()
    assert (a.block_table, b.num_uncomputed_tokens) == ([], 1)
    again = engine.scheduler.schedule()
    assert [(s.sequence.id, s.start, s.num_tokens) for s in again.scheduled] == [("b", 4, 1)]
    assert engine.update(again)[0].tokens[0].index == 1
