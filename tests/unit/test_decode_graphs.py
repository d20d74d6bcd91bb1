"""Decode steps through recorded graphs: the ladder, the padding, the buffers, and that nothing shows in tokens or blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shared.base.request import Output, Request, SamplingParams
from shared.engine.compute.batch import known_token_ids
from shared.engine.compute.decode_graphs import DecodeGraphs, ladder
from shared.engine.compute.runner import ModelRunner
from shared.engine.memory.kv_pool import KvPool
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Plan
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.schedule.sequence import Sequence
from tests.support.engine import VOCAB_SIZE, make_sequence, make_tiny_model, schedule, tiny_runner
from tests.support.recording import record

MAX_NUM_SEQS = 11
MAX_MODEL_LEN = 96
NUM_BLOCKS = 64
BLOCK_SIZE = 16
CONTEXT_LENS = (1, 15, 16, 17, 33, 48, 95, 2, 64, 80, 31)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model("mistral", folder)
    return tiny_runner(folder, num_blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def replays(eager: ModelRunner) -> list[int]:
    """How often the graph of each batch size was replayed, in order."""
    return []


@pytest.fixture(scope="module")
def graphed(eager: ModelRunner, replays: list[int]) -> ModelRunner:
    """The same model with a pool and graphs of its own."""
    pool = KvPool(eager.pool.geometry, NUM_BLOCKS, torch.device("cpu"), eager.model.kernels)
    sizes = ladder(MAX_NUM_SEQS)
    captured: list[int] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        size = sizes[-1 - len(captured)]
        captured.append(size)
        replay = record(work)

        def counted() -> None:
            replays.append(size)
            replay()

        return counted

    return ModelRunner(eager.model, pool, MAX_MODEL_LEN, DecodeGraphs(eager.model, pool, MAX_MODEL_LEN, sizes, capture))


def graphs_of(runner: ModelRunner) -> DecodeGraphs:
    assert runner._decode_graphs is not None
    return runner._decode_graphs


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 4, 5]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_the_ladder_reaches_every_batch_size(max_num_seqs: int, sizes: list[int]) -> None:
    assert ladder(max_num_seqs) == sizes


def test_a_large_ladder_is_ascending_with_ever_wider_steps() -> None:
    sizes = ladder(1000)
    steps = [after - before for before, after in pairwise(sizes[3:-1])]
    assert steps == sorted(steps)
    assert set(steps) == {8, 16, 32}
    assert sizes[-1] == 1000


def scatter_blocks_of(context_lens: tuple[int, ...], seed: int) -> list[Sequence]:
    """Sequences whose last token is due, over blocks in random order; the first two full blocks of every other one are shared."""
    rng = random.Random(seed)
    free = rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    shared, common = [free.pop(), free.pop()], [rng.randrange(VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE)]
    sequences = []
    for i, length in enumerate(context_lens):
        shares = i % 2 == 0 and length > 2 * BLOCK_SIZE
        ids = (common if shares else []) + [rng.randrange(VOCAB_SIZE) for _ in range(length - (len(common) if shares else 0))]
        sequence = make_sequence(ids, i, 0)
        sequence.block_table = (shared if shares else []) + [
            free.pop() for _ in range(-(-length // BLOCK_SIZE) - (2 if shares else 0))
        ]
        sequence.num_computed_tokens = length - 1
        sequences.append(sequence)
    return sequences


def poison(runner: ModelRunner, seed: int) -> None:
    """What earlier steps may have left in the buffers, at its worst: every row writes to and reads from blocks of others."""
    graphs, generator = graphs_of(runner), torch.Generator().manual_seed(seed)

    def fill(buffer: Tensor, end: int) -> None:
        buffer.copy_(torch.randint(end, buffer.shape, generator=generator))

    fill(graphs._token_ids, VOCAB_SIZE)
    fill(graphs._positions, MAX_MODEL_LEN)
    fill(graphs._slots, NUM_BLOCKS * BLOCK_SIZE)
    fill(graphs._context_lens, MAX_MODEL_LEN)
    fill(graphs._block_tables, NUM_BLOCKS)
    graphs._logits.fill_(torch.nan)


@pytest.mark.parametrize("num_seqs", range(1, MAX_NUM_SEQS + 1))
def test_logits_and_blocks_are_those_of_the_eager_step_whatever_the_buffers_held(
    num_seqs: int, eager: ModelRunner, graphed: ModelRunner, replays: list[int]
) -> None:
    plan = Plan(tuple(schedule(s) for s in scatter_blocks_of(CONTEXT_LENS[:num_seqs], seed=num_seqs)))
    before = torch.randn(eager.pool.kv.shape, generator=torch.Generator().manual_seed(num_seqs))
    for runner in (eager, graphed):
        runner.pool.kv.copy_(before)
    poison(graphed, seed=num_seqs)
    assert graphs_of(graphed).can_run(plan)
    with torch.inference_mode():
        expected = eager._logits(plan)
    actual = graphs_of(graphed).run(plan, torch.from_numpy(known_token_ids(plan)))
    assert replays[-1] == min(size for size in ladder(MAX_NUM_SEQS) if size >= num_seqs)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    # Every block but 0 is what the eager step made of it, also those that no sequence of the step has.
    torch.testing.assert_close(graphed.pool.kv[1:], eager.pool.kv[1:], atol=1e-4, rtol=1e-4)
    written = (graphed.pool.kv[1:] != before[1:]).flatten(1).any(dim=1).nonzero().flatten() + 1
    assert set(written.tolist()) == {s.sequence.block_table[-1] for s in plan.scheduled}


def test_only_steps_in_which_each_sequence_has_one_token_and_samples_are_replayed(graphed: ModelRunner) -> None:
    one, chunk, long = make_sequence([1], 1, 1), make_sequence([1, 2, 3], 2, 1), make_sequence([1, 2], 3, 1)
    graphs = graphs_of(graphed)
    assert graphs.can_run(Plan((schedule(one),)))
    assert not graphs.can_run(Plan((schedule(one), schedule(chunk))))
    assert not graphs.can_run(Plan((schedule(one), schedule(long, 1))))  # a chunk of one token samples nothing
    assert not graphs.can_run(Plan((schedule(one),) * (MAX_NUM_SEQS + 1)))


def requests() -> list[Request]:
    """Long and short, greedy and sampled, with and without a common prefix, some in several outputs."""
    rng = random.Random(7)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    made = []
    for i in range(16):
        prompt = (common if i % 3 == 0 else []) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        sampling = SamplingParams(
            max_tokens=rng.randint(2, 24),
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
            n=rng.choice([1, 1, 1, 3]),
            stop_token_ids=(5, 6, 7),
            repetition_penalty=1.2 if i == 3 else 1.0,
            logit_bias=rng.choice([{}, {9: 2.0}]),
            min_tokens=rng.choice([0, 2]),
            num_logprobs=rng.choice([None, 2]),
        )
        made.append(Request(f"r{i}", prompt, len(prompt), sampling))
    return made


def outputs_of(runner: ModelRunner, num_blocks: int, looks_ahead: bool = False) -> dict[tuple[str, int], list[int]]:
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        digest="digest",
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=48,
        max_model_len=MAX_MODEL_LEN,
    )
    for request in requests():
        scheduler.add(Sequence(request))
    outputs: dict[tuple[str, int], list[int]] = {}
    plan, num_ahead = Plan(), 0
    while plan.scheduled or scheduler.has_work:
        if not plan.scheduled:
            plan = scheduler.schedule()
            if not plan.scheduled:
                continue
            samples = runner.launch(plan)
        ahead = scheduler.schedule_ahead() if looks_ahead else None
        samples_ahead = runner.launch(ahead) if ahead is not None else samples
        for event in scheduler.update(plan, samples.wait()):
            assert isinstance(event, Output)
            outputs.setdefault((event.request_id, event.choice), []).extend(token.token_id for token in event.tokens)
        num_ahead += ahead is not None
        plan, samples = ahead or Plan(), samples_ahead
    assert looks_ahead == (num_ahead > 5)
    return outputs


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 14])  # with 14 sequences are preempted
def test_tokens_of_a_whole_service_are_those_without_graphs_and_without_looking_ahead(
    num_blocks: int, looks_ahead: bool, eager: ModelRunner, graphed: ModelRunner, replays: list[int]
) -> None:
    replays.clear()
    for runner in (eager, graphed):
        runner.pool.kv.fill_(torch.nan)  # nobody reads what nobody wrote
    expected = outputs_of(eager, num_blocks)
    assert outputs_of(graphed, num_blocks, looks_ahead) == expected
    assert len(set(replays)) >= 3


def test_an_eager_step_that_was_launched_ahead_takes_its_tokens_from_the_one_before(eager: ModelRunner) -> None:
    assert outputs_of(eager, NUM_BLOCKS, looks_ahead=True) == outputs_of(eager, NUM_BLOCKS)
