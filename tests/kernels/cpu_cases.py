"""What the tests of the CPU kernels share: the compiled backend, the oracle, and random paged batches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.cpu import CpuKernels
from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import KvLayer
from shared.kernels.reference import ReferenceKernels
from tests.support.quantized_kv import quantized_layer

REFERENCE = ReferenceKernels()

DTYPES = [torch.float32, torch.bfloat16]


@functools.cache
def cpu_kernels() -> CpuKernels:
    return CpuKernels()


def assert_near(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Float32 to its rounding after some hundred sums; bfloat16 to one unit of its last place."""
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.bfloat16:
        torch.testing.assert_close(actual, expected, atol=2**-8 * scale, rtol=2**-7)
    else:
        torch.testing.assert_close(actual, expected, atol=3e-6 * scale, rtol=1e-5)


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Paged:
    """A step over a pool in which only the slots of live keys hold numbers; the rest is NaN."""

    q: Tensor  # [T, Hq, D], a view into a fused projection
    k: Tensor  # [T, Hkv, D], likewise; as are the values
    v: Tensor
    kv: Tensor  # [NB, L, 2, Hkv, BS, D]
    batch: AttentionBatch

    @property
    def kv_layer(self) -> KvLayer:
        return KvLayer(self.kv[:, 1])

    def quantized(self, dtype: torch.dtype) -> KvLayer:
        """The same layer in a pool of a one-byte type."""
        return quantized_layer(self.kv[:, 1], dtype)


def paged(lens: list[tuple[int, int]], shape: Shape, seed: int, window: int = 0) -> Paged:
    """Sequences of (queries, keys), single queries first, in blocks scattered at random over a pool of three layers."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-keys // shape.block_size) for _, keys in lens]
    ids = (torch.randperm(sum(counts) + 3, generator=generator) + 1)[: sum(counts)].split(counts)
    tables = torch.zeros(len(lens), max(counts) + 2, dtype=torch.int32)
    kv = torch.full((sum(counts) + 4, 3, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), math.nan, dtype=shape.dtype)
    positions, slots = [], []
    for (queries, keys), table, blocks in zip(lens, tables, ids, strict=True):
        table[: len(blocks)] = blocks
        first_seen = max(0, keys - queries - window + 1) if window else 0
        for p in range(first_seen, keys):
            live = kv[table[p // shape.block_size], 1, :, :, p % shape.block_size]
            live.copy_(torch.randn(live.shape, generator=generator))
        position = torch.arange(keys - queries, keys)
        positions.append(position)
        slots.append(table[position // shape.block_size].long() * shape.block_size + position % shape.block_size)
    starts = torch.tensor([0] + [queries for queries, _ in lens]).cumsum(0).int()
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    fused = torch.randn(int(starts[-1]), sum(heads) * shape.head_dim, generator=generator).to(shape.dtype)
    q, k, v = fused.view(len(fused), sum(heads), shape.head_dim).split(heads, dim=1)
    batch = AttentionBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=starts,
        context_lens=torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        block_tables=tables,
        num_single=sum(queries == 1 for queries, _ in lens),
        max_query_len=max(queries for queries, _ in lens),
        max_context_len=max(keys for _, keys in lens),
    )
    return Paged(q, k, v, kv, batch)
