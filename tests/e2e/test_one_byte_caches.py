"""One-byte KV caches through real workers: cold, prefix-cached and handed-over runs give the same tokens, and workers that store
different types do not pair."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shared.base.worker_info import Role
from shared.options.worker import WorkerConfig
from tests.support.cluster import Cluster, cluster, request
from tests.support.engine import VOCAB_SIZE, make_tiny_model, tiny_runner

LENGTHS = (1, 15, 16, 17, 33, 120)
NUM_OUTPUT_TOKENS = 12
CONFIG = WorkerConfig(transfer_timeout_s=20.0, max_num_batched_tokens=48)


async def run(made: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    return [(await made.run(request(prompt, NUM_OUTPUT_TOKENS)))[0] for prompt in prompts]


@pytest.mark.parametrize(("kv_cache_dtype", "kernels"), [("int8", "reference"), ("int8", "cpu"), ("fp8", "cpu")])
async def test_cold_cached_and_handed_over_tokens_are_the_same(kv_cache_dtype: str, kernels: str, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    rng = random.Random(kv_cache_dtype)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    options = {"kv_cache_dtype": kv_cache_dtype, "kernels": kernels}
    async with cluster() as made:
        await made.add(Role.COLOCATED, runner=tiny_runner(tmp_path, **options), config=CONFIG)
        expected = await run(made, prompts)
        assert await run(made, prompts) == expected  # now from the prefix cache
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL, runner=tiny_runner(tmp_path, **options), config=CONFIG)
        await made.add(Role.DECODE, runner=tiny_runner(tmp_path, **options), config=CONFIG)
        assert await run(made, prompts) == expected
        assert await run(made, prompts) == expected
        assert prefill.info().load.num_steps >= len(prompts)


async def test_workers_with_different_kv_cache_dtypes_do_not_pair_and_the_router_says_what_to_compare(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL, runner=tiny_runner(tmp_path, kv_cache_dtype="int8"), config=CONFIG)
        await made.add(Role.DECODE, runner=tiny_runner(tmp_path), config=CONFIG)
        before = prefill.info().load.num_steps
        assert len((await made.run(request([5, 6, 7], 4)))[0]) == 4
        assert prefill.info().load.num_steps == before
        assert "--kv-cache-dtype" in str(made.dispatcher.is_ready())
