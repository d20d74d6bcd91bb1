"""Tiny random models on the GPU: what the runner samples greedily is what transformers, on the same GPU, finds best, with decode
steps as CUDA graphs and without.

Run by `python -m bench.kernels.gpu_check`; the name keeps pytest from collecting it where there is no GPU.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from shared.engine.compute.runner import ModelRunner
from shared.engine.schedule.plan import Plan
from shared.engine.schedule.sequence import Sequence
from tests.support.engine import VOCAB_SIZE, make_sequence, make_tiny_model, schedule, tiny_runner

PROMPT_LENS = (1, 15, 16, 17, 60)
NUM_OUTPUT_TOKENS = 12
NUM_BLOCKS_EACH = 6  # of 16 tokens
CHUNK_TOKENS = 24
DEVICE = "cuda"
# By how much a sampled token's logit may fall short of the best: rounding decides between near equals.
MARGINS = {"float32": 1e-3, "bfloat16": 0.2}


def step(runner: ModelRunner, sequences: list[Sequence]) -> None:
    """One plan: sequences with a single token come first, long prompts go in chunks."""
    ordered = sorted(sequences, key=lambda s: s.num_uncomputed_tokens > 1)
    plan = Plan(tuple(schedule(s, min(s.num_uncomputed_tokens, CHUNK_TOKENS)) for s in ordered))
    for scheduled, sampled in zip(plan.scheduled, runner.execute(plan), strict=True):
        scheduled.sequence.num_computed_tokens += scheduled.num_tokens
        scheduled.sequence.token_ids += [token.token_id for token in sampled]


@torch.inference_mode()
def margins(model: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    """For each output token, by how much its logit falls short of the best."""
    ids = torch.tensor([sequence.token_ids], device=DEVICE)
    logits = model(ids).logits[0, sequence.request.num_prompt_tokens - 1 : -1].float()
    chosen = logits.gather(1, ids[0, sequence.request.num_prompt_tokens :, None])[:, 0]
    return logits.max(dim=1).values - chosen


def generate(runner: ModelRunner, seed: str) -> list[Sequence]:
    """Sequences that reach decoding one after the other, so that the batch size of decode steps varies."""
    rng = random.Random(seed)
    sequences = [
        make_sequence([rng.randrange(3, VOCAB_SIZE) for _ in range(length)], 1 + i * NUM_BLOCKS_EACH, NUM_BLOCKS_EACH)
        for i, length in enumerate(PROMPT_LENS)
    ]
    while unfinished := [s for s in sequences if s.num_output_tokens < NUM_OUTPUT_TOKENS]:
        step(runner, unfinished)
    return sequences


@pytest.mark.parametrize("dtype", MARGINS)
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "mistral", "qwen2-window", "qwen3"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_are_the_best_by_transformers(enforce_eager: bool, kind: str, dtype: str, tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path).to(DEVICE)
    runner = tiny_runner(tmp_path, device=DEVICE, kernels="auto", dtype=dtype, num_blocks=64, enforce_eager=enforce_eager)
    for sequence in generate(runner, seed=kind):
        assert float(margins(model, sequence).max()) <= MARGINS[dtype]


@pytest.mark.parametrize("kind", ["llama", "qwen2-window"])
def test_replayed_steps_give_the_tokens_of_eager_ones(kind: str, tmp_path: Path) -> None:
    make_tiny_model(kind, tmp_path)
    options = {"device": DEVICE, "kernels": "auto", "dtype": "float32", "num_blocks": 64}
    replayed, eager = (generate(tiny_runner(tmp_path, enforce_eager=value, **options), seed=kind) for value in (False, True))
    assert [s.token_ids for s in replayed] == [s.token_ids for s in eager]


def test_the_pool_leaves_room_for_the_graphs(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    options = {"device": DEVICE, "kernels": "auto", "num_blocks": None, "gpu_memory_utilization": 0.5}
    runner = tiny_runner(tmp_path, max_num_seqs=256, **options)
    free, total = torch.cuda.mem_get_info()
    step(runner, [make_sequence([5] * length, 1 + i * NUM_BLOCKS_EACH, NUM_BLOCKS_EACH) for i, length in enumerate(PROMPT_LENS)])
    assert total - free <= 0.51 * total  # what libraries take at their first use is not foreseen
