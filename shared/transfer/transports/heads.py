"""Pools that hold only some of the model's KV heads, as on each device of a worker that is split over several.

    heads     0  1  2 │ 3  4 │ 5
    pools     [  A   ] [ B  ] [C]      the same block ids in each
    a chunk         [ 2  3  4 ]        its first head belongs to A, the others to B

The two sides of a handoff may be split differently. A chunk names its heads; whoever writes it puts each where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from torch import Tensor

from shared.base.errors import CorruptTransfer
from shared.engine.memory.block_part import BlockPart, as_slice
from shared.engine.memory.kv_pool import KvPool
from shared.transfer.transports.interface import Payload


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A pool that holds the model's KV heads first_head, first_head + 1, …, as many as its geometry says."""

    pool: KvPool
    first_head: int = 0

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.pool.geometry.num_kv_heads)


class PoolGroup:
    """Pools that together hold all KV heads of the model, each head once, in order. A worker on one device has one of them."""

    def __init__(self, shards: Sequence[HeadShard]) -> None:
        num_heads = sum(len(shard.heads) for shard in shards)
        assert [head for shard in shards for head in shard.heads] == list(range(num_heads)), "a head is missing or is there twice"
        first = shards[0].pool
        self.shards = tuple(shards)
        self.geometry = replace(first.geometry, num_kv_heads=num_heads)  # the whole model's
        self.num_blocks = first.num_blocks
        for shard in shards:
            whole = replace(shard.pool.geometry, num_kv_heads=num_heads)
            assert (whole, shard.pool.num_blocks) == (self.geometry, self.num_blocks), "the pools differ in more than their heads"

    @classmethod
    def of(cls, pool: KvPool) -> PoolGroup:
        """One pool with all heads."""
        return cls([HeadShard(pool)])

    def write_blocks(self, block_ids: Sequence[int], data: Payload, part: BlockPart) -> None:
        """As `KvPool.write_blocks`, with heads of the whole model; every head goes to the pool that holds it. A flat tensor may be
        on any device. Raises CorruptTransfer, and writes nothing, if a range or the size of `data` is wrong."""
        heads = part.heads
        holders = list(overlaps(self.shards, heads))
        g = self.geometry
        shape = (len(block_ids), len(part.layers), 2, len(heads), g.head_bytes)
        size_bytes = data.numel() if isinstance(data, Tensor) else len(data)
        if not 0 <= heads.start < heads.stop <= g.num_kv_heads or size_bytes != prod(shape):
            raise CorruptTransfer(f"{size_bytes} bytes came for heads {heads.start}..{heads.stop - 1}; {prod(shape)} are due")
        for shard, common in holders:
            cut = data if len(holders) == 1 else _cut_heads(data, shape, within(common, heads.start))
            if isinstance(cut, Tensor):
                cut = cut.to(shard.pool.device)
            shard.pool.write_blocks(block_ids, cut, BlockPart(part.layers, within(common, shard.first_head)))


def overlaps(shards: Sequence[HeadShard], heads: range) -> Iterator[tuple[HeadShard, range]]:
    """The pools that have some of the heads, and which."""
    for shard in shards:
        common = common_heads(shard.heads, heads)
        if common:
            yield shard, common


def common_heads(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def within(heads: range, first_head: int) -> range:
    """Where the heads are in something that begins with `first_head`."""
    return range(heads.start - first_head, heads.stop - first_head)


def _cut_heads(data: Payload, shape: tuple[int, ...], heads: range) -> Payload:
    """Some heads of a chunk of `shape`, flat. A copy."""
    if isinstance(data, Tensor):
        return data.view(shape)[:, :, :, as_slice(heads)].flatten()
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)[:, :, :, as_slice(heads)].reshape(-1).data
