"""Random problems for the Triton kernels, on a GPU or, under TRITON_INTERPRET=1, in Triton's interpreter on the CPU.

Pools are filled with NaN wherever no sequence may look: block 0, unused blocks, and slots past a sequence's last key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import KvLayer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_LAYERS = 2
LAYER = 1  # the layer under test: its blocks are not contiguous to each other

# The interpreter's store cuts float32 to bfloat16 instead of rounding: one unit in the last place.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rtol, atol=atol)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(device=DEVICE, dtype=dtype)


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_size}-bs{self.block_size}"


@dataclass(frozen=True)
class Problem:
    q: Tensor  # [T, Hq, D], a strided view
    kv: Tensor  # [NB, L, 2, Hkv, BS, D]
    batch: AttentionBatch

    @property
    def kv_layer(self) -> KvLayer:
        return KvLayer(self.kv[:, LAYER])


def make_batch(query_lens: list[int], context_lens: list[int], block_size: int, seed: int) -> tuple[AttentionBatch, int]:
    """A batch over shuffled blocks, with as many blocks unused as used; returns it and the number of blocks."""
    num_blocks_each = [-(-n // block_size) for n in context_lens]
    num_blocks = 1 + 2 * sum(num_blocks_each)
    ids = (torch.randperm(num_blocks - 1, generator=generator(seed)) + 1).tolist()
    tables = torch.zeros(len(context_lens), max(num_blocks_each) + 1, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for row, (query_len, context_len, n) in enumerate(zip(query_lens, context_lens, num_blocks_each, strict=True)):
        tables[row, :n] = torch.tensor([ids.pop() for _ in range(n)], dtype=torch.int32)
        own = range(context_len - query_len, context_len)
        positions += own
        slots += [int(tables[row, p // block_size]) * block_size + p % block_size for p in own]
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    num_single = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    batch = AttentionBatch(
        positions=torch.tensor(positions, device=DEVICE),
        slots=torch.tensor(slots, device=DEVICE),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        num_single=num_single,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    return batch, num_blocks


def make_problem(heads: Heads, query_lens: list[int], context_lens: list[int], dtype: torch.dtype, seed: int) -> Problem:
    batch, num_blocks = make_batch(query_lens, context_lens, heads.block_size, seed)
    num_tokens = sum(query_lens)
    fused = randn(num_tokens, heads.num_heads + 2, heads.head_size, seed=seed + 1, dtype=dtype)
    kv = torch.full((num_blocks, NUM_LAYERS, 2, heads.num_kv_heads, heads.block_size, heads.head_size), torch.nan)
    values = torch.randn(kv.shape, generator=generator(seed + 2))
    for table, context_len in zip(batch.block_tables.tolist(), context_lens, strict=True):
        for position in range(context_len):
            block, offset = table[position // heads.block_size], position % heads.block_size
            kv[block, :, :, :, offset] = values[block, :, :, :, offset]
    return Problem(fused[:, : heads.num_heads], kv.to(device=DEVICE, dtype=dtype), batch)


def sampling_batch(
    num_rows: int,
    temperature: list[float] | float = 1.0,
    top_k: list[int] | int = 0,
    top_p: list[float] | float = 1.0,
    min_p: list[float] | float = 0.0,
    uniforms: list[float] | None = None,
    seed: int = 0,
) -> SamplingBatch:
    def column(values: list[float] | list[int] | float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values if isinstance(values, list) else [values] * num_rows, dtype=dtype, device=DEVICE)

    drawn = torch.rand(num_rows, generator=generator(seed)) if uniforms is None else torch.tensor(uniforms)
    temperatures, top_ks = column(temperature, torch.float32), column(top_k, torch.int64)
    top_ps, min_ps = column(top_p, torch.float32), column(min_p, torch.float32)
    return SamplingBatch(
        temperature=temperatures,
        top_k=top_ks,
        top_p=top_ps,
        min_p=min_ps,
        uniforms=drawn.to(device=DEVICE, dtype=torch.float32),
        all_greedy=bool((temperatures == 0).all()),
        needs_filter=bool((top_ks > 0).any() or (top_ps < 1).any() or (min_ps > 0).any()),
    )
