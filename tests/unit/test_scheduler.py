"""Each rule of the scheduler alone. `test_scheduler_properties.py` mixes them."""

from __future__ import annotations

import pytest

from shared.base.errors import ConfigError, CorruptTransfer, InvalidRequest, StaleTransfer
from shared.base.request import FinishReason, Output, Request, SamplingParams
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Event, Plan, Progress, SampledToken
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.schedule.sequence import Sequence, Status
from tests.support.fake_kv import FakeModel, first_tokens, solo_outputs

BLOCK_SIZE = 4


class Engine:
    """A scheduler with a fake model, one step at a time."""

    def __init__(
        self, num_blocks: int = 33, max_num_seqs: int = 4, max_num_batched_tokens: int = 16, max_model_len: int = 64
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.blocks,
            digest="d",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.model = FakeModel(BLOCK_SIZE)
        self.max_model_len = max_model_len

    def add(self, request: Request, hold: bool = False) -> Sequence:
        sequence = Sequence(request, hold=hold)
        self.scheduler.add(sequence)
        return sequence

    def reserve(self, request: Request) -> Sequence:
        """Of a request that finds room at once."""
        sequence = self.scheduler.reserve(request)
        assert self.scheduler.grant() == [sequence]
        return sequence

    def fill_and_commit(self, sequence: Sequence) -> list[Output]:
        self.model.write(sequence, sequence.num_computed_tokens, sequence.num_tokens)
        tokens = first_tokens(sequence.token_ids, sequence.request.sampling.n)
        return self.scheduler.commit(sequence.id, tokens, sequence.num_cached_tokens)

    def step(self) -> tuple[Plan, list[Event]]:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        events = self.scheduler.update(plan, self.model.execute(plan)) if plan.scheduled else []
        self.scheduler.check()
        return plan, [*plan.outputs, *events]

    def run(self) -> list[Output]:
        outputs = []
        while self.scheduler.has_work:
            outputs += [event for event in self.step()[1] if isinstance(event, Output)]
        return outputs


def request_of(name: str, num_tokens: int, max_tokens: int = 8, n: int = 1, salt: str = "", num_emitted: int = 0) -> Request:
    """Distinct names give prompts that share no prefix."""
    token_ids = [hash((position, *name.encode())) % 1000 for position in range(num_tokens)]
    return Request(name, token_ids, num_tokens - num_emitted, SamplingParams(max_tokens=max_tokens, n=n), salt)


def shape(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(item.sequence.id, item.start, item.num_tokens, item.num_samples) for item in plan.scheduled]


def tokens_of(outputs: list[Output], request_id: str, choice: int = 0) -> list[int]:
    tokens = [token for o in outputs if (o.request_id, o.choice) == (request_id, choice) for token in o.tokens]
    assert [token.index for token in tokens] == list(range(tokens[0].index, tokens[0].index + len(tokens)))
    return [token.token_id for token in tokens]


# --- limits


def test_a_budget_smaller_than_the_number_of_sequences_is_refused_naming_both_flags() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 3.*--max-num-seqs \(4\)"):
        Engine(max_num_seqs=4, max_num_batched_tokens=3)


def test_a_pool_too_small_for_one_sequence_is_refused_naming_both_flags() -> None:
    Engine(num_blocks=17, max_model_len=64)
    with pytest.raises(ConfigError, match=r"--max-model-len is 64.* 60 tokens.*--num-blocks"):
        Engine(num_blocks=16, max_model_len=64)


@pytest.mark.parametrize(
    ("request_", "param", "message"),
    [
        (request_of("a", 64), "prompt", "64 tokens.*fewer than 64"),
        (request_of("a", 8, n=5), "n", "n is 5; it must be at most 4"),
        (request_of("a", 8, max_tokens=3, num_emitted=3), "max_tokens", "max_tokens is 3, but 3"),
        (request_of("taken", 8), "request_id", "'taken' is in use"),
    ],
)
def test_what_can_never_be_served_is_refused_naming_the_parameter(request_: Request, param: str, message: str) -> None:
    engine = Engine()
    engine.add(request_of("taken", 4))
    for attempt in (engine.add, engine.scheduler.reserve):
        with pytest.raises(InvalidRequest, match=message) as caught:
            attempt(request_)
        assert caught.value.param == param
    assert engine.scheduler.num_waiting == 1
    engine.scheduler.check()


# --- a step


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_then_decoded() -> None:
    engine = Engine()
    engine.add(request_of("a", 20, max_tokens=3))
    assert shape(engine.step()[0]) == [("a", 0, 16, 0)]
    assert shape(engine.step()[0]) == [("a", 16, 4, 1)]
    assert shape(engine.step()[0]) == [("a", 20, 1, 1)]
    assert shape(engine.step()[0]) == [("a", 21, 1, 1)]
    assert not engine.scheduler.has_work
    assert engine.blocks.num_free_blocks == 32


def test_outputs_carry_absolute_indexes_the_end_and_cached_tokens_once() -> None:
    engine = Engine()
    request = request_of("a", 9, max_tokens=5)
    engine.add(request)
    outputs = engine.run()
    assert [token.index for output in outputs for token in output.tokens] == [0, 1, 2, 3, 4]
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    again = Request("b", request.token_ids, 9, request.sampling)
    engine.add(again)
    assert [output.num_cached_tokens for output in engine.run()] == [8, 0, 0, 0, 0]


def test_a_fully_cached_prompt_recomputes_at_least_its_last_token() -> None:
    engine = Engine()
    request = request_of("a", 8, max_tokens=1)
    engine.add(request)
    engine.run()
    engine.add(Request("b", request.token_ids, 8, request.sampling))
    assert shape(engine.step()[0]) == [("b", 4, 4, 1)]


def test_a_continued_request_goes_on_at_its_next_index_with_the_same_tokens() -> None:
    engine = Engine()
    whole = request_of("whole", 10, max_tokens=8)
    (expected, _), *_ = solo_outputs(whole, 64)
    engine.add(Request("rest", [*whole.token_ids, *expected[:3]], 10, whole.sampling))
    outputs = engine.run()
    assert tokens_of(outputs, "rest") == expected[3:]
    assert outputs[0].tokens[0].index == 3


def test_decodes_come_first_and_are_never_delayed_by_prompts() -> None:
    engine = Engine(num_blocks=65, max_num_batched_tokens=6)
    for name in ("a", "b"):
        engine.add(request_of(name, 2, max_tokens=12))
    engine.step()
    engine.add(request_of("long", 40))
    for _ in range(10):
        plan, _ = engine.step()
        assert [entry[0] for entry in shape(plan)[:2]] == ["a", "b"]
        assert [item.num_tokens for item in plan.scheduled] == [1, 1, 4]


def test_single_tokens_stand_before_chunks_also_when_they_are_the_rest_of_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=5)
    engine.add(request_of("a", 7))
    engine.add(request_of("b", 7))
    engine.step()  # a: 5 of 7
    engine.step()  # a: 2, b: 3
    engine.add(request_of("c", 9))
    assert shape(engine.step()[0]) == [("a", 7, 1, 1), ("b", 3, 4, 1)]
    engine.scheduler.abort("a")
    engine.scheduler.abort("b")
    engine.step()
    engine.add(request_of("d", 3))
    assert shape(engine.step()[0]) == [("d", 0, 1, 0), ("c", 5, 4, 1)]


def test_the_head_of_the_queue_is_never_overtaken_by_one_that_would_fit() -> None:
    engine = Engine(num_blocks=17, max_num_batched_tokens=64)
    engine.add(request_of("a", 30, max_tokens=4))
    engine.step()
    engine.add(request_of("big", 40, max_tokens=1))
    engine.add(request_of("small", 2, max_tokens=1))
    order = [output.request_id for output in engine.run() if output.request_id != "a"]
    assert order == ["big", "small"]


def test_a_newcomer_leaves_a_block_for_every_running_sequence() -> None:
    engine = Engine(num_blocks=17, max_num_batched_tokens=64)
    engine.add(request_of("a", 30))  # 8 of 16 blocks
    engine.add(request_of("b", 32))  # 8 more would leave none for a
    assert [entry[0] for entry in shape(engine.step()[0])] == ["a"]
    engine.scheduler.reserve(request_of("c", 32))
    assert engine.scheduler.grant() == []


def test_an_output_ends_when_the_sequence_reaches_the_models_length() -> None:
    engine = Engine(max_model_len=12)
    engine.add(request_of("a", 10, max_tokens=50))
    outputs = engine.run()
    assert len(tokens_of(outputs, "a")) == 2
    assert outputs[-1].finish_reason is FinishReason.LENGTH


# --- preemption


def test_when_blocks_run_out_the_newest_gives_way_and_nothing_is_emitted_twice() -> None:
    engine = Engine(num_blocks=9, max_model_len=32)
    requests = [request_of(name, 12, max_tokens=18) for name in ("a", "b")]
    sequences = [engine.add(request) for request in requests]
    outputs: list[Output] = []
    while sequences[1].num_preemptions == 0:
        outputs += [event for event in engine.step()[1] if isinstance(event, Output)]
    assert sequences[0].num_preemptions == 0
    assert (sequences[1].status, sequences[1].num_computed_tokens) == (Status.WAITING, 0)
    outputs += engine.run()
    for request in requests:
        assert tokens_of(outputs, request.request_id) == solo_outputs(request, 32)[0][0]
    assert engine.blocks.num_free_blocks == 8


def test_the_preempted_sequence_returns_before_those_that_came_later() -> None:
    engine = Engine(num_blocks=9, max_model_len=32)
    engine.add(request_of("a", 12, max_tokens=18))
    preempted = engine.add(request_of("b", 12, max_tokens=18))
    engine.step()
    engine.step()
    late = engine.add(request_of("late", 4))
    while preempted.num_preemptions == 0:
        engine.step()
    while preempted.status is Status.WAITING:
        assert late.status is Status.WAITING
        engine.step()


def test_a_held_prompt_is_never_preempted() -> None:
    engine = Engine(num_blocks=9, max_model_len=32, max_num_batched_tokens=4)
    own = engine.add(request_of("own", 12, max_tokens=16))
    for _ in range(4):
        engine.step()
    held = engine.add(request_of("held", 12), hold=True)
    while held.status is not Status.HELD:
        engine.step()
    table = list(held.block_table)
    while own.status is not Status.WAITING:
        engine.step()
    assert not engine.scheduler.has_work  # nothing can run until the held blocks come back
    assert held.block_table == table
    engine.scheduler.release("held")
    assert engine.scheduler.has_work
    engine.run()
    assert engine.blocks.num_free_blocks == 8


# --- n outputs


def test_n_outputs_share_the_prompts_blocks_and_each_is_what_it_would_be_alone() -> None:
    engine = Engine()
    request = request_of("a", 10, max_tokens=6, n=3)
    engine.add(request)
    plan, events = engine.step()
    assert shape(plan) == [("a", 0, 10, 3)]
    assert [(event.choice, event.tokens[0].index) for event in events if isinstance(event, Output)] == [(0, 0), (1, 0), (2, 0)]
    assert engine.blocks.num_free_blocks == 32 - 3
    outputs = [event for event in events if isinstance(event, Output)]
    plan, events = engine.step()
    assert len(plan.copies) == 2
    outputs += [event for event in events if isinstance(event, Output)] + engine.run()
    for choice, (expected, _) in enumerate(solo_outputs(request, 64)):
        assert tokens_of(outputs, "a", choice) == expected
    assert engine.blocks.num_free_blocks == 32


def test_a_forking_sequence_needs_seats_for_all_its_outputs() -> None:
    engine = Engine(max_num_seqs=4)
    engine.add(request_of("a", 4, max_tokens=3, n=2))
    engine.add(request_of("b", 4, max_tokens=3, n=3))
    engine.step()
    assert [entry[0] for entry in shape(engine.step()[0])] == ["a", "a"]
    assert engine.scheduler.num_waiting == 1
    engine.step()
    assert [entry[0] for entry in shape(engine.step()[0])] == ["b"]


# --- reservations


def test_a_reservation_takes_all_blocks_at_once_and_is_not_scheduled() -> None:
    engine = Engine()
    sequence = engine.reserve(request_of("a", 10))
    assert (sequence.status, len(sequence.block_table), engine.scheduler.num_reserved) == (Status.RESERVED, 3, 1)
    assert not engine.scheduler.has_work
    assert engine.scheduler.schedule().scheduled == ()


def test_a_commit_emits_the_first_tokens_and_decoding_goes_on_from_there() -> None:
    engine = Engine()
    request = request_of("a", 10, max_tokens=5, n=2)
    outputs = engine.fill_and_commit(engine.reserve(request))
    assert [(output.choice, output.tokens[0].index) for output in outputs] == [(0, 0), (1, 0)]
    assert shape(engine.scheduler.schedule()) == [("a", 10, 1, 1)] * 2


def test_a_committed_request_gives_the_same_tokens_as_a_local_one() -> None:
    engine = Engine()
    request = request_of("a", 10, max_tokens=5, n=2)
    outputs = engine.fill_and_commit(engine.reserve(request)) + engine.run()
    for choice, (expected, _) in enumerate(solo_outputs(request, 64)):
        assert tokens_of(outputs, "a", choice) == expected
    assert engine.blocks.num_free_blocks == 32


def test_a_request_that_ends_at_its_first_token_ends_at_commit() -> None:
    engine = Engine()
    outputs = engine.fill_and_commit(engine.reserve(request_of("a", 10, max_tokens=1)))
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH]
    assert engine.blocks.num_free_blocks == 32
    assert not engine.scheduler.sequences()


def test_a_reservation_may_find_every_block_of_its_prompt_cached() -> None:
    engine = Engine()
    request = request_of("a", 8, max_tokens=3)
    engine.fill_and_commit(engine.reserve(request))
    second = engine.reserve(Request("b", request.token_ids, 8, request.sampling))
    assert second.num_computed_tokens == 8
    outputs = engine.fill_and_commit(second)
    assert outputs[0].num_cached_tokens == 8
    assert tokens_of(outputs + engine.run(), "b") == solo_outputs(request, 64)[0][0]


def test_a_committed_request_is_in_the_prefix_cache_and_an_uncommitted_one_is_not() -> None:
    engine = Engine()
    request = request_of("a", 9)
    sequence = engine.reserve(request)
    assert engine.blocks.cached_hashes() == []
    engine.fill_and_commit(sequence)
    assert len(engine.blocks.cached_hashes()) == 2


def test_a_committed_request_waits_for_a_seat_with_its_blocks_and_gives_its_first_token_with_the_seat() -> None:
    engine = Engine(max_num_seqs=2)
    for name in ("a", "b"):
        engine.fill_and_commit(engine.reserve(request_of(name, 5, max_tokens=3)))
    request = request_of("c", 5, max_tokens=3)
    assert engine.fill_and_commit(engine.reserve(request)) == []
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
    for _ in range(2):
        plan, events = engine.step()
        assert [entry[0] for entry in shape(plan)] == ["a", "b"]
        assert [event.request_id for event in events if isinstance(event, Output)] == ["a", "b"]
    plan, events = engine.step()
    assert shape(plan) == [("c", 5, 1, 1)]
    assert [o.tokens[0].index for o in plan.outputs] == [0]
    outputs = [event for event in events if isinstance(event, Output)] + engine.run()
    assert tokens_of(outputs, "c") == solo_outputs(request, 64)[0][0]


@pytest.mark.parametrize("first", ["local", "handed over"])
def test_a_free_seat_goes_to_whoever_came_first(first: str) -> None:
    engine = Engine(max_num_seqs=1)
    engine.fill_and_commit(engine.reserve(request_of("a", 5, max_tokens=3)))
    if first == "local":
        engine.add(request_of("local", 5, max_tokens=2))
    engine.fill_and_commit(engine.reserve(request_of("handed over", 5, max_tokens=2)))
    if first != "local":
        engine.add(request_of("local", 5, max_tokens=2))
    order = dict.fromkeys(output.request_id for output in engine.run() if output.request_id != "a")
    assert list(order) == [first, "local" if first != "local" else "handed over"]
    assert engine.scheduler.num_preemptions == 0


def test_a_waiting_request_takes_no_free_seat_before_an_older_committed_one_that_needs_several() -> None:
    engine = Engine(max_num_seqs=3)
    engine.add(request_of("a", 5, max_tokens=4))
    engine.step()
    assert engine.fill_and_commit(engine.reserve(request_of("older", 5, n=3))) == []
    engine.add(request_of("younger", 5))
    assert [entry[0] for entry in shape(engine.step()[0])] == ["a"]
    order = dict.fromkeys(output.request_id for output in engine.run() if output.request_id != "a")
    assert list(order) == ["older", "younger"]


def test_a_handed_over_request_that_came_first_keeps_its_place_until_it_is_committed_but_no_seat() -> None:
    engine = Engine(max_num_seqs=1)
    early = engine.reserve(request_of("early", 5, max_tokens=3))
    for name in ("b", "c"):
        engine.add(request_of(name, 5, max_tokens=3))
    assert [entry[0] for entry in shape(engine.step()[0])] == ["b"]
    engine.fill_and_commit(early)
    order = dict.fromkeys(output.request_id for output in engine.run())
    assert list(order) == ["b", "early", "c"]


def test_the_first_in_line_keeps_its_seat_from_younger_committed_ones_while_it_lacks_blocks() -> None:
    engine = Engine(num_blocks=17, max_num_seqs=2)
    engine.add(request_of("a", 4, max_tokens=10))
    engine.add(request_of("b", 4, max_tokens=12))
    engine.step()
    engine.add(request_of("first", 44, max_tokens=2))  # 11 blocks of the 14 that are free now
    younger = engine.reserve(request_of("younger", 4, max_tokens=2))
    assert engine.fill_and_commit(younger) == []
    for _ in range(9):
        assert [entry[0] for entry in shape(engine.step()[0])] == ["a", "b"]
    for _ in range(2):  # 11 blocks are free, but b may grow
        assert [entry[0] for entry in shape(engine.step()[0])] == ["b"]
    plan, _ = engine.step()
    assert [entry[0] for entry in shape(plan)] == ["younger", "first"]


def test_where_the_first_in_line_lacks_blocks_and_nothing_runs_the_newest_committed_gives_up_its_own() -> None:
    engine = Engine(num_blocks=9, max_num_seqs=1, max_model_len=32)
    requests = [request_of("first", 12, max_tokens=10), request_of("older", 8), request_of("younger", 8, max_tokens=3)]
    first = engine.add(requests[0])
    outputs = [event for event in engine.step()[1] if isinstance(event, Output)]
    older, younger = engine.reserve(requests[1]), engine.reserve(requests[2])  # all but the block kept for the first to grow
    while first.status is Status.RUNNING:
        outputs += [event for event in engine.step()[1] if isinstance(event, Output)]
    assert not engine.scheduler.has_work
    assert engine.fill_and_commit(older) + engine.fill_and_commit(younger) == []
    outputs += engine.run()
    assert (older.num_preemptions, younger.num_preemptions) == (0, 1)
    assert list(dict.fromkeys(output.request_id for output in outputs)) == ["first", "older", "younger"]
    for request in requests:
        assert tokens_of(outputs, request.request_id) == solo_outputs(request, 32)[0][0]


def test_where_a_stream_lacks_a_block_a_younger_committed_one_gives_up_its_own() -> None:
    engine = Engine(num_blocks=9, max_num_seqs=1, max_model_len=32)
    requests = [request_of("first", 12, max_tokens=16), request_of("younger", 16, max_tokens=3)]
    first = engine.add(requests[0])
    outputs = [event for event in engine.step()[1] if isinstance(event, Output)]
    younger = engine.reserve(requests[1])
    assert engine.fill_and_commit(younger) == []
    outputs += engine.run()
    assert (first.num_preemptions, younger.num_preemptions) == (0, 1)
    for request in requests:
        assert tokens_of(outputs, request.request_id) == solo_outputs(request, 32)[0][0]


def test_no_more_than_64_blocks_are_kept_free_for_streams_to_grow() -> None:
    engine = Engine(num_blocks=200, max_num_seqs=80, max_num_batched_tokens=200, max_model_len=400)
    for index in range(66):
        engine.add(request_of(f"r{index}", 1))
    engine.step()
    assert engine.blocks.num_free_blocks == 133
    engine.scheduler.reserve(request_of("large", 70 * BLOCK_SIZE))
    assert engine.scheduler.grant() == []
    engine.scheduler.abort("large")
    engine.reserve(request_of("fits", 69 * BLOCK_SIZE))


def test_cached_tokens_of_a_continuation_are_at_most_its_prompt() -> None:
    engine = Engine()
    request = request_of("a", 16, max_tokens=1)
    engine.add(request)
    engine.run()
    engine.add(Request("rest", request.token_ids, 6, SamplingParams(max_tokens=11)))
    assert [output.num_cached_tokens for output in engine.run()] == [6]


def test_of_a_committed_request_with_n_outputs_all_are_seated_together() -> None:
    engine = Engine(max_num_seqs=3)
    engine.fill_and_commit(engine.reserve(request_of("a", 5, max_tokens=2)))
    request = request_of("b", 5, max_tokens=2, n=3)
    assert engine.fill_and_commit(engine.reserve(request)) == []
    assert [entry[0] for entry in shape(engine.step()[0])] == ["a"]
    plan, _ = engine.step()
    assert [(o.request_id, o.choice) for o in plan.outputs] == [("b", 0), ("b", 1), ("b", 2)]
    assert [entry[0] for entry in shape(plan)] == ["b"] * 3


def test_a_committed_request_that_has_ended_needs_no_seat() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(request_of("a", 5))
    engine.step()
    engine.fill_and_commit(engine.reserve(request_of("waits", 5)))
    outputs = engine.fill_and_commit(engine.reserve(request_of("b", 5, max_tokens=1)))
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("b", FinishReason.LENGTH)]


def test_cached_tokens_of_a_committed_request_are_those_that_prefill_did_not_compute() -> None:
    engine = Engine()
    request = request_of("a", 8, max_tokens=3)
    engine.add(request)
    engine.run()  # both blocks are cached here, but prefill had none
    sequence = engine.reserve(Request("b", request.token_ids, 8, request.sampling))
    assert sequence.num_computed_tokens == 8
    (output,) = engine.scheduler.commit("b", first_tokens(sequence.token_ids, 1), num_cached_tokens=0)
    assert output.num_cached_tokens == 0
    other = engine.reserve(request_of("c", 8, n=3))  # cached there only
    engine.model.write(other, 0, 8)
    outputs = engine.scheduler.commit("c", first_tokens(other.token_ids, 3), num_cached_tokens=4)
    assert [o.num_cached_tokens for o in outputs] == [4, 4, 4]


def test_cached_tokens_count_what_was_cached_at_admission_also_after_a_preemption_before_the_first_token() -> None:
    engine = Engine(num_blocks=9, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=2)
    seed = request_of("seed", 8, max_tokens=1)
    engine.add(seed)
    engine.run()
    own = engine.add(request_of("own", 10, max_tokens=20))
    for _ in range(5):
        engine.step()
    late = engine.add(Request("late", [*seed.token_ids, *range(900, 908)], 16, SamplingParams(max_tokens=2)))
    while late.num_preemptions == 0:
        assert late.num_output_tokens == 0
        engine.step()
    assert own.num_preemptions == 0
    outputs = [output for output in engine.run() if output.request_id == "late"]
    assert [output.num_cached_tokens for output in outputs] == [8, 0]


def test_reservations_wait_for_blocks_in_order_and_hold_none_meanwhile() -> None:
    engine = Engine(num_blocks=17)
    engine.reserve(request_of("a", 40))
    large, small = engine.scheduler.reserve(request_of("large", 40)), engine.scheduler.reserve(request_of("small", 4))
    assert engine.scheduler.grant() == []
    assert (large.status, small.status, small.block_table) == (Status.ASKING, Status.ASKING, [])
    assert (engine.scheduler.num_reserved, engine.scheduler.num_waiting, engine.scheduler.has_work) == (1, 2, False)
    engine.scheduler.check()
    engine.scheduler.abort("a")
    assert engine.scheduler.grant() == [large, small]
    assert engine.scheduler.num_reserved == 2


def test_an_abort_of_the_one_that_asks_lets_the_next_have_its_blocks() -> None:
    engine = Engine(num_blocks=17)
    engine.reserve(request_of("a", 40))
    engine.scheduler.reserve(request_of("large", 40))
    small = engine.scheduler.reserve(request_of("small", 4))
    assert engine.scheduler.grant() == []
    assert engine.scheduler.abort("large")
    assert engine.scheduler.grant() == [small]


def test_a_reservation_does_not_take_what_an_older_waiting_sequence_needs() -> None:
    engine = Engine(num_blocks=17)
    engine.add(request_of("waiting", 40))  # 10 of 16 blocks
    engine.scheduler.reserve(request_of("a", 28))
    assert engine.scheduler.grant() == []
    engine.scheduler.abort("a")
    engine.reserve(request_of("b", 24))


def test_a_waiting_sequence_takes_no_blocks_before_an_older_reservation_that_asks_for_some() -> None:
    engine = Engine(num_blocks=17)
    engine.reserve(request_of("a", 40))
    asking = engine.scheduler.reserve(request_of("asking", 28))
    engine.add(request_of("waiting", 4, max_tokens=1))
    assert engine.scheduler.grant() == []
    assert not engine.scheduler.has_work
    assert engine.scheduler.schedule().scheduled == ()
    engine.scheduler.abort("a")
    assert engine.scheduler.grant() == [asking]
    assert [entry[0] for entry in shape(engine.step()[0])] == ["waiting"]


def test_a_commit_without_a_reservation_or_with_a_wrong_number_of_tokens_is_refused() -> None:
    engine = Engine()
    token = SampledToken(1)
    with pytest.raises(StaleTransfer, match="nobody"):
        engine.scheduler.commit("nobody", [token], 0)
    engine.reserve(request_of("a", 8, n=2))
    with pytest.raises(CorruptTransfer, match="1 first tokens for 2"):
        engine.scheduler.commit("a", [token], 0)
    engine.scheduler.commit("a", [token, token], 0)
    with pytest.raises(StaleTransfer):
        engine.scheduler.commit("a", [token, token], 0)


# --- stopped outputs


def test_a_stopped_output_gives_its_own_blocks_back_and_the_others_go_on() -> None:
    engine = Engine()
    request = request_of("a", 10, max_tokens=6, n=3)
    engine.add(request)
    outputs = [*engine.step()[1], *engine.step()[1]]  # each has a last block of its own now
    free = engine.blocks.num_free_blocks
    assert engine.scheduler.stop_choice("a", 1)
    assert not engine.scheduler.stop_choice("a", 1)
    engine.scheduler.check()
    assert engine.blocks.num_free_blocks == free + 1
    outputs += engine.run()
    of_two = [output for output in outputs if isinstance(output, Output)]
    for choice, (expected, _) in enumerate(solo_outputs(request, 64)):
        assert tokens_of(of_two, "a", choice) == (expected[:2] if choice == 1 else expected)
    assert engine.blocks.num_free_blocks == 32


def test_an_output_stopped_during_a_step_keeps_its_blocks_until_the_step_is_over() -> None:
    engine = Engine()
    engine.add(request_of("a", 10, n=2))
    engine.step()
    plan = engine.scheduler.schedule()
    free = engine.blocks.num_free_blocks
    assert engine.scheduler.stop_choice("a", 0)
    assert engine.blocks.num_free_blocks == free
    events = engine.scheduler.update(plan, engine.model.execute(plan))
    assert [event.choice for event in events if isinstance(event, Output)] == [1]
    assert engine.blocks.num_free_blocks == free + 1


@pytest.mark.parametrize("way", ["local", "handed over"])
def test_an_output_stopped_before_there_is_one_never_comes(way: str) -> None:
    engine = Engine()
    request = request_of("a", 10, max_tokens=3, n=3)
    sequence = engine.add(request) if way == "local" else engine.reserve(request)
    assert engine.scheduler.stop_choice("a", 0)
    assert not engine.scheduler.stop_choice("a", 0)
    assert not engine.scheduler.stop_choice("a", 3)
    outputs = engine.fill_and_commit(sequence) if way == "handed over" else []
    outputs += engine.run()
    assert {output.choice for output in outputs} == {1, 2}
    for choice in (1, 2):
        assert tokens_of(outputs, "a", choice) == solo_outputs(request, 64)[choice][0]
    assert engine.blocks.num_free_blocks == 32


@pytest.mark.parametrize("n", [1, 2])
def test_a_stopped_reservation_keeps_its_blocks_until_its_sender_has_ended(n: int) -> None:
    engine = Engine()
    sequence = engine.reserve(request_of("a", 10, n=n))
    for choice in range(n):
        assert engine.scheduler.stop_choice("a", choice)
    assert (sequence.status, engine.blocks.num_free_blocks) == (Status.RESERVED, 32 - 3)
    assert engine.fill_and_commit(sequence) == []
    assert (sequence.status, engine.blocks.num_free_blocks) == (Status.FINISHED, 32)


def test_a_request_whose_outputs_are_all_stopped_ends_with_its_prompt_and_needs_no_seat() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(request_of("other", 5))
    sequence = engine.reserve(request_of("a", 10, n=2))
    for choice in (0, 1):
        assert engine.scheduler.stop_choice("a", choice)
    assert sequence.status is Status.RESERVED  # a prefill worker may be writing to its blocks
    assert engine.fill_and_commit(sequence) == []
    assert sequence.status is Status.FINISHED
    assert engine.blocks.num_free_blocks == 32


@pytest.mark.parametrize(("request_id", "choice"), [("nobody", 0), ("a", 1)])
def test_stopping_what_is_not_there_changes_nothing(request_id: str, choice: int) -> None:
    engine = Engine()
    engine.add(request_of("a", 10))
    engine.step()
    assert not engine.scheduler.stop_choice(request_id, choice)
    assert tokens_of(engine.run(), "a")


# --- held prompts


def test_a_held_prompt_reports_progress_then_its_first_tokens_and_keeps_its_blocks_until_release() -> None:
    engine = Engine()
    request = request_of("a", 20, n=2)
    engine.add(request, hold=True)
    assert engine.step()[1] == [Progress("a", 16)]
    progress, *outputs = engine.step()[1]
    assert progress == Progress("a", 20)
    expected = [tokens[0] for tokens, _ in solo_outputs(request, 64)]
    assert [(o.choice, o.tokens[0].index, o.tokens[0].token_id) for o in outputs if isinstance(o, Output)] == [
        (0, 0, expected[0]),
        (1, 0, expected[1]),
    ]
    assert (engine.scheduler.num_held, engine.blocks.num_free_blocks, engine.scheduler.has_work) == (1, 32 - 5, False)
    engine.scheduler.release("a")
    engine.scheduler.release("a")
    assert (engine.scheduler.num_held, engine.blocks.num_free_blocks) == (0, 32)
    assert len(engine.blocks.cached_hashes()) == 5


def test_a_held_prompt_says_when_its_first_token_is_its_last() -> None:
    engine = Engine()
    engine.add(request_of("a", 5, max_tokens=1), hold=True)
    output = engine.step()[1][-1]
    assert isinstance(output, Output)
    assert output.finish_reason is FinishReason.LENGTH
    assert engine.scheduler.num_held == 1


# --- aborts


def test_an_abort_between_schedule_and_update_keeps_the_blocks_until_the_step_is_over() -> None:
    engine = Engine()
    engine.add(request_of("a", 10))
    plan = engine.scheduler.schedule()
    assert engine.scheduler.abort("a")
    assert not engine.scheduler.sequences()
    assert engine.blocks.num_free_blocks == 32 - 3
    engine.scheduler.check()
    assert engine.scheduler.update(plan, engine.model.execute(plan)) == []
    assert engine.blocks.num_free_blocks == 32
    assert engine.blocks.cached_hashes() == []


def test_an_abort_ends_all_outputs_in_every_state_and_is_idempotent() -> None:
    engine = Engine(max_num_seqs=3)
    engine.add(request_of("held", 8), hold=True)
    engine.step()
    engine.add(request_of("running", 8, n=3))
    engine.step()
    engine.fill_and_commit(engine.reserve(request_of("committed", 8)))
    engine.add(request_of("waiting", 8))
    engine.reserve(request_of("reserved", 8))
    asking = engine.scheduler.reserve(request_of("asking", 60))
    states = (Status.HELD, Status.COMMITTED, Status.WAITING, Status.RESERVED, Status.ASKING)
    found = {s.id: s.status for s in engine.scheduler.sequences() if s.id != "running"}
    assert (found, asking.status) == (
        dict(zip(("held", "committed", "waiting", "reserved", "asking"), states, strict=True)),
        states[-1],
    )
    for name in ("held", "running", "committed", "waiting", "reserved", "asking"):
        assert engine.scheduler.abort(name)
        assert not engine.scheduler.abort(name)
        engine.scheduler.check()
    assert not engine.scheduler.sequences()
    assert engine.blocks.num_free_blocks == 32


def test_the_id_of_an_aborted_request_may_be_used_again_at_once() -> None:
    engine = Engine()
    request = request_of("a", 10, max_tokens=4)
    engine.add(request)
    plan = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    engine.add(request)
    engine.scheduler.update(plan, [[]])
    assert tokens_of(engine.run(), "a") == solo_outputs(request, 64)[0][0]


def test_a_failed_step_gives_back_what_was_aborted_and_computes_the_rest_again() -> None:
    engine = Engine()
    engine.add(request_of("a", 10))
    engine.add(request_of("b", 12))
    plan = engine.scheduler.schedule()
    engine.scheduler.abort("a")
    engine.scheduler.discard(plan)
    engine.scheduler.check()
    assert engine.blocks.num_free_blocks == 32 - engine.blocks.num_blocks_for(12)
    assert tokens_of(engine.run(), "b") == solo_outputs(request_of("b", 12), 64)[0][0]


def test_a_failed_step_whose_copies_were_perhaps_not_made_leaves_outputs_right() -> None:
    engine = Engine()
    request = request_of("a", 6, max_tokens=4, n=3)
    engine.add(request)
    outputs = [event for event in engine.step()[1] if isinstance(event, Output)]
    plan = engine.scheduler.schedule()
    assert len(plan.copies) == 2
    engine.scheduler.discard(plan)  # the model never saw it
    engine.scheduler.check()
    outputs += engine.run()
    for choice, (expected, _) in enumerate(solo_outputs(request, 64)):
        assert tokens_of(outputs, "a", choice) == expected
    assert engine.blocks.num_free_blocks == 32


# --- what others read


def test_the_backlog_counts_tokens_that_must_be_computed_before_all_are_decodes() -> None:
    engine = Engine()
    engine.add(request_of("a", 20))
    engine.add(request_of("b", 5))
    assert (engine.scheduler.num_waiting, engine.scheduler.num_waiting_tokens) == (2, 19 + 4)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting_tokens) == (1, 3 + 4)
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting_tokens) == (2, 0)


def test_tenants_with_different_salts_do_not_share_blocks() -> None:
    engine = Engine()
    request = request_of("a", 9, salt="one")
    engine.add(request)
    engine.run()
    engine.add(Request("b", request.token_ids, 9, request.sampling, "two"))
    assert shape(engine.step()[0]) == [("b", 0, 9, 1)]
    engine.scheduler.abort("b")
    engine.add(Request("c", request.token_ids, 9, request.sampling, "one"))
    assert shape(engine.step()[0]) == [("c", 8, 1, 1)]
