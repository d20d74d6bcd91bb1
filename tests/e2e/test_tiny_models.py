"""Tiny random models of every supported family, through real workers: colocated, handed over and prefix-cached runs give exactly
the tokens of transformers' generate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from shared.base.worker_info import Role
from shared.options.worker import WorkerConfig
from tests.support.cluster import Cluster, cluster, request
from tests.support.engine import VOCAB_SIZE, make_tiny_model, tiny_runner

LENGTHS = (1, 15, 16, 17, 33, 120)
NUM_OUTPUT_TOKENS = 12
CONFIG = WorkerConfig(transfer_timeout_s=20.0, max_num_batched_tokens=48)


def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_OUTPUT_TOKENS, min_new_tokens=NUM_OUTPUT_TOKENS,
        do_sample=False, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


async def run(made: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    return [(await made.run(request(prompt, NUM_OUTPUT_TOKENS)))[0] for prompt in prompts]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
async def test_all_ways_of_serving_equal_generate(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model(kind, tmp_path)
    rng = random.Random(kind)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    expected = [generate(model, prompt) for prompt in prompts]
    async with cluster() as made:
        await made.add(Role.COLOCATED, runner=tiny_runner(tmp_path), config=CONFIG)
        assert await run(made, prompts) == expected
        assert await run(made, prompts) == expected  # now from the prefix cache
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL, runner=tiny_runner(tmp_path), config=CONFIG)
        await made.add(Role.DECODE, runner=tiny_runner(tmp_path), config=CONFIG)
        assert await run(made, prompts) == expected
        assert await run(made, prompts) == expected
        assert prefill.info().load.num_steps >= len(prompts)
