"""Pools that hold the model's KV heads together: what is written for any heads is found with them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.base.errors import CorruptTransfer
from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import BlockPart
from shared.engine.memory.kv_pool import KvPool
from shared.kernels.reference import ReferenceKernels
from shared.transfer.transports.heads import HeadShard, PoolGroup

NUM_HEADS, NUM_BLOCKS = 6, 5
GEOMETRY = KvGeometry("digest", "bfloat16", num_layers=3, num_kv_heads=NUM_HEADS, head_dim=4, block_size=8, kv_dtype="bfloat16")
HEAD_BYTES = 8 * 4 * 2
SPLITS = [(6,), (1, 5), (3, 3), (2, 1, 3), (1, 1, 1, 1, 1, 1)]


def group(split: Sequence[int], memory: np.ndarray) -> PoolGroup:
    """Pools that hold their part of memory [NB, L, 2, H, HEAD_BYTES]."""
    shards, first = [], 0
    for count in split:
        pool = KvPool(replace(GEOMETRY, num_kv_heads=count), NUM_BLOCKS, torch.device("cpu"), ReferenceKernels())
        pool.cpu_blocks[...] = memory[:, :, :, first : first + count]
        shards.append(HeadShard(pool, first))
        first += count
    return PoolGroup(shards)


def part(first_layer: int, num_layers: int, first_head: int, num_heads: int) -> BlockPart:
    return BlockPart(range(first_layer, first_layer + num_layers), range(first_head, first_head + num_heads))


def together(pools: PoolGroup) -> np.ndarray:
    return np.concatenate([shard.pool.cpu_blocks for shard in pools.shards], axis=3)


@given(
    split=st.sampled_from(SPLITS),
    heads=st.tuples(st.integers(0, NUM_HEADS - 1), st.integers(1, NUM_HEADS)).filter(lambda h: sum(h) <= NUM_HEADS),
    layers=st.sampled_from([(0, 3), (0, 1), (1, 2), (2, 1)]),
    block_ids=st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, unique=True),
    as_tensor=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_written_heads_are_where_they_belong(
    split: tuple[int, ...],
    heads: tuple[int, int],
    layers: tuple[int, int],
    block_ids: list[int],
    as_tensor: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    expected = rng.integers(0, 256, (NUM_BLOCKS, 3, 2, NUM_HEADS, HEAD_BYTES), dtype=np.uint8)
    pools = group(split, expected)
    chunk = rng.integers(0, 256, (len(block_ids), layers[1], 2, heads[1], HEAD_BYTES), dtype=np.uint8)
    data = torch.from_numpy(chunk.copy()).flatten() if as_tensor else chunk.tobytes()
    pools.write_blocks(block_ids, data, part(*layers, *heads))
    for block_id, block in zip(block_ids, chunk, strict=True):
        for layer in range(layers[1]):
            for head in range(heads[1]):
                expected[block_id, layers[0] + layer, :, heads[0] + head] = block[layer, :, head]
    assert np.array_equal(together(pools), expected)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("change", [{"size": -1}, {"size": 1}, {"first_head": 3}, {"num_heads": 0, "size": -999}, {"block": 9}])
def test_a_wrong_size_or_range_is_corrupt_and_changes_nothing(split: tuple[int, ...], change: dict[str, int]) -> None:
    before = np.random.default_rng(7).integers(0, 256, (NUM_BLOCKS, 3, 2, NUM_HEADS, HEAD_BYTES), dtype=np.uint8)
    pools = group(split, before)
    num_heads = change.get("num_heads", 4)
    size_bytes = max(0, 3 * 2 * 4 * HEAD_BYTES + change.get("size", 0))
    with pytest.raises(CorruptTransfer):
        pools.write_blocks([change.get("block", 2)], bytes(size_bytes), part(0, 3, change.get("first_head", 0), num_heads))
    assert np.array_equal(together(pools), before)


def test_pools_that_are_not_one_model_are_a_mistake() -> None:
    memory = np.zeros((NUM_BLOCKS, 3, 2, NUM_HEADS, HEAD_BYTES), dtype=np.uint8)
    shards = group((2, 1, 3), memory).shards
    assert PoolGroup(shards).geometry == GEOMETRY
    with pytest.raises(AssertionError, match="missing"):
        PoolGroup(shards[::2])
    with pytest.raises(AssertionError, match="missing"):
        PoolGroup(shards[::-1])
