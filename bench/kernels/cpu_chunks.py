"""How near attention of prompt chunks on the CPU comes to its arithmetic limit: `python -m bench.kernels.cpu_chunks`.

A chunk's attention is two products, of which causality needs a part; only that part is counted. The limit, torch's product of
large square matrices, is measured in the same run, interleaved; each figure is the best of several rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.kernels.cpu_attention import BLOCK_SIZE, DTYPES, SHAPES, Shape, best_of, random_layer
from shared.kernels.cpu import CpuKernels
from shared.kernels.interface import AttentionBatch

# Queries, and keys up to the last of them: a short prompt, a chunk beside decodes, a late chunk of a long prompt.
CHUNKS = ((512, 512), (256, 1024), (512, 4096))
_SQUARE = 1024


@dataclass(frozen=True, slots=True)
class Result:
    time_s: float
    flops_per_s: float
    square_flops_per_s: float


def measure(
    kernels: CpuKernels,
    shape: Shape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_queries: int,
    context_len: int,
    num_rounds: int,
) -> Result:
    layer, _ = random_layer(shape, kv_dtype, context_len // BLOCK_SIZE + 1)
    q = torch.randn(num_queries, shape.num_heads, shape.head_dim).to(dtype)
    batch = _chunk(num_queries, context_len)
    square = torch.randn(_SQUARE, _SQUARE)
    chunk_s, square_s = best_of(
        num_rounds, lambda: kernels.attention(q, layer, batch, shape.head_dim**-0.5), lambda: square @ square
    )
    num_scores = sum(range(context_len - num_queries + 1, context_len + 1))
    return Result(chunk_s, 4 * shape.num_heads * shape.head_dim * num_scores / chunk_s, 2 * _SQUARE**3 / square_s)


def _chunk(num_queries: int, context_len: int) -> AttentionBatch:
    """The last queries of one prompt; blocks in random order, as after long service."""
    return AttentionBatch(
        positions=torch.arange(context_len - num_queries, context_len),
        slots=torch.zeros(num_queries, dtype=torch.int64),
        query_starts=torch.tensor([0, num_queries], dtype=torch.int32),
        context_lens=torch.tensor([context_len], dtype=torch.int32),
        block_tables=(torch.randperm(context_len // BLOCK_SIZE) + 1).int().view(1, -1),
        num_single=0,
        max_query_len=num_queries,
        max_context_len=context_len,
    )


def _lines(num_rounds: int) -> Iterator[str]:
    kernels = CpuKernels()
    for shape in SHAPES:
        for dtype, kv_dtype in DTYPES:
            for num_queries, context_len in CHUNKS:
                r = measure(kernels, shape, dtype, kv_dtype, num_queries, context_len, num_rounds)
                types = f"{str(dtype).removeprefix('torch.'):10}{str(kv_dtype).removeprefix('torch.'):15}"
                rates = f"{r.time_s * 1e3:9.2f}{r.flops_per_s / 1e9:9.0f}{r.square_flops_per_s / 1e9:9.0f}"
                share = r.flops_per_s / r.square_flops_per_s
                yield f"{shape.name:14}{types}{num_queries:8}{context_len:9}{rates}{share:7.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    print(f"{'shape':14}{'dtype':10}{'stored':15}{'queries':>8}{'context':>9}{'ms':>9}{'GFLOP/s':>9}{'squares':>9}{'share':>7}")
    for line in _lines(args.num_rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
