"""How near paged decode attention on the CPU comes to the speed of memory: `python -m bench.kernels.cpu_attention [--json]`.

Decode attention reads each key and value once and computes little with it, so memory's read bandwidth is its limit. That is
measured in the same run, interleaved with the kernel, as a sum over a buffer as large as the keys and values (no cache holds it);
each figure is the best of several rounds. Goal: 80% or more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.base.blocks_of import num_blocks_of
from shared.kernels.cpu import CpuKernels
from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import LARGEST_STORED, KvLayer, typed_views

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


# Compute type and stored type.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.int8),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.bfloat16),
)
SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Llama-3-8B", 32, 8, 128))


@dataclass(frozen=True, slots=True)
class Result:
    shape: str
    dtype: str
    kv_dtype: str
    batch_size: int
    context_len: int
    num_threads: int
    time_s: float
    attention_bytes_per_s: float
    memory_bytes_per_s: float

    @property
    def share_of_memory(self) -> float:
        return self.attention_bytes_per_s / self.memory_bytes_per_s


def measure(
    kernels: CpuKernels,
    shape: Shape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    batch_size: int,
    context_len: int,
    num_rounds: int,
) -> Result:
    num_blocks = batch_size * num_blocks_of(context_len, BLOCK_SIZE)
    kv_layer, head_bytes = random_layer(shape, kv_dtype, num_blocks + 1)
    q = torch.randn(batch_size, shape.num_heads, shape.head_dim).to(dtype)
    batch = _decode_batch(batch_size, context_len, num_blocks)
    size_bytes = 2 * shape.num_kv_heads * num_blocks * head_bytes
    buffer = torch.ones(size_bytes // 4)
    attention_s, memory_s = best_of(
        num_rounds, lambda: kernels.attention(q, kv_layer, batch, shape.head_dim**-0.5), lambda: buffer.sum()
    )
    return Result(
        shape=shape.name,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        batch_size=batch_size,
        context_len=context_len,
        num_threads=torch.get_num_threads(),
        time_s=attention_s,
        attention_bytes_per_s=size_bytes / attention_s,
        memory_bytes_per_s=buffer.nbytes / memory_s,
    )


def random_layer(shape: Shape, kv_dtype: torch.dtype, num_blocks: int) -> tuple[KvLayer, int]:
    """A pool of one layer, and the bytes of one head's keys or values in a block."""
    token_bytes = shape.head_dim * kv_dtype.itemsize + (torch.float32.itemsize if kv_dtype in LARGEST_STORED else 0)
    runs = torch.zeros(num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE * token_bytes, dtype=torch.uint8)
    values, scales = typed_views(runs, kv_dtype, BLOCK_SIZE, shape.head_dim)
    values[:] = torch.randn(values.shape[1:])
    if scales is not None:
        scales[:] = 1.0
    return KvLayer(values, scales), BLOCK_SIZE * token_bytes


def _decode_batch(batch_size: int, context_len: int, num_blocks: int) -> AttentionBatch:
    """One query per sequence; blocks in random order, as after long service."""
    return AttentionBatch(
        positions=torch.full((batch_size,), context_len - 1),
        slots=torch.zeros(batch_size, dtype=torch.int64),
        query_starts=torch.arange(batch_size + 1, dtype=torch.int32),
        context_lens=torch.full((batch_size,), context_len, dtype=torch.int32),
        block_tables=(torch.randperm(num_blocks) + 1).int().view(batch_size, -1),
        num_single=batch_size,
        max_query_len=1,
        max_context_len=context_len,
    )


def best_of(num_rounds: int, *bodies: Callable[[], Tensor]) -> list[float]:
    """The shortest time of each body, in seconds; they take turns, so that a busy spell of the machine hits all of them."""
    best = [float("inf")] * len(bodies)
    for _ in range(num_rounds):
        for i, body in enumerate(bodies):
            start = time.perf_counter()
            body()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def results(batch_size: int, context_len: int, num_rounds: int) -> Iterator[Result]:
    kernels = CpuKernels()
    for shape in SHAPES:
        for dtype, kv_dtype in DTYPES:
            yield measure(kernels, shape, dtype, kv_dtype, batch_size, context_len, num_rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    if not args.json:
        print(
            f"{'shape':14}{'dtype':10}{'stored':15}{'batch':>6}{'context':>9}{'threads':>9}{'ms':>9}{'GB/s':>8}{'memory':>8}{'share':>7}"
        )
    for r in results(args.batch_size, args.context_len, args.num_rounds):
        if args.json:
            print(json.dumps(dataclasses.asdict(r) | {"share_of_memory": r.share_of_memory}), flush=True)
            continue
        rates = f"{r.time_s * 1e3:9.2f}{r.attention_bytes_per_s / 1e9:8.1f}{r.memory_bytes_per_s / 1e9:8.1f}"
        print(
            f"{r.shape:14}{r.dtype:10}{r.kv_dtype:15}{r.batch_size:6}{r.context_len:9}{r.num_threads:9}{rates}{r.share_of_memory:7.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
