"""Attention and block copies on a GPU, each against what the device can do: its measured copy, and torch's own attention.

Heads as in Llama 3 8B: 32 query heads and 8 KV heads of 128, bfloat16, blocks of 16 tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.gpu_timing import seconds
from shared.base.blocks_of import num_blocks_of
from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import KvLayer
from shared.kernels.triton import TritonKernels

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_LAYERS = 32, 8, 128, 16, 32
DTYPE = torch.bfloat16
DECODE_BATCHES = (1, 16, 64, 256)
DECODE_CONTEXTS = (1024, 4096, 16384)
PREFILL_LENGTHS = (2048, 8192, 16384)
WORKSPACE_BYTES = 2 * 2**30
NUM_SHIPPED_BLOCKS = 512  # of 2 MiB: 8192 tokens

Rows = list[dict[str, float | int]]


def decode_attention(copy_bytes_per_s: float) -> Rows:
    rows: Rows = []
    for batch_size in DECODE_BATCHES:
        for context_len in DECODE_CONTEXTS:
            read_bytes = batch_size * context_len * NUM_KV_HEADS * HEAD_SIZE * 2 * DTYPE.itemsize
            if not fits(read_bytes):
                continue
            elapsed_s = _attention_seconds(batch_size, 1, context_len)
            rows.append(
                {
                    "batch": batch_size,
                    "context": context_len,
                    "us": elapsed_s * 1e6,
                    "GB/s": read_bytes / elapsed_s / 1e9,
                    "of copy": read_bytes / elapsed_s / copy_bytes_per_s,
                }
            )
    return rows


def prefill_attention() -> Rows:
    rows: Rows = []
    for length in PREFILL_LENGTHS:
        flops = 4 * NUM_HEADS * HEAD_SIZE * length**2 / 2  # the causal half
        ours_s, torch_s = _attention_seconds(1, length, length), _torch_attention_seconds(length)
        rows.append({"tokens": length, "TFLOP/s": flops / ours_s / 1e12, "torch SDPA TFLOP/s": flops / torch_s / 1e12})
    return rows


def block_copies(copy_bytes_per_s: float) -> Rows:
    kernels = TritonKernels()
    num_blocks = 2 * NUM_SHIPPED_BLOCKS + 1
    kv = torch.zeros(num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, dtype=DTYPE, device="cuda")
    block_ids = torch.randperm(num_blocks - 1, device="cuda")[:NUM_SHIPPED_BLOCKS] + 1
    blocks = kernels.gather_blocks(kv, block_ids)
    moved_bytes = 2 * blocks.numel() * blocks.itemsize
    gather_s = seconds(lambda: kernels.gather_blocks(kv, block_ids))
    scatter_s = seconds(lambda: kernels.scatter_blocks(kv, block_ids, blocks))
    return [
        {
            "blocks": NUM_SHIPPED_BLOCKS,
            "gather GB/s": moved_bytes / gather_s / 1e9,
            "scatter GB/s": moved_bytes / scatter_s / 1e9,
            "gather of copy": moved_bytes / gather_s / copy_bytes_per_s,
            "scatter of copy": moved_bytes / scatter_s / copy_bytes_per_s,
        }
    ]


def fits(size_bytes: int) -> bool:
    """A smaller device leaves out the largest problems."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return size_bytes + WORKSPACE_BYTES < free_bytes


def shuffled_batch(batch_size: int, query_len: int, context_len: int, num_blocks: int) -> AttentionBatch:
    """Equally long sequences whose last `query_len` tokens are computed, over all blocks but block 0, in random order."""
    tables = (torch.randperm(num_blocks - 1) + 1).view(batch_size, -1)
    positions = torch.arange(context_len - query_len, context_len).repeat(batch_size)
    owners = torch.arange(batch_size).repeat_interleave(query_len)
    slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        positions=positions.cuda(),
        slots=slots.cuda(),
        query_starts=torch.arange(0, batch_size * query_len + 1, query_len, dtype=torch.int32).cuda(),
        context_lens=torch.full((batch_size,), context_len, dtype=torch.int32).cuda(),
        block_tables=tables.to(torch.int32).cuda(),
        num_single=batch_size if query_len == 1 else 0,
        max_query_len=query_len,
        max_context_len=context_len,
    )


def _attention_seconds(batch_size: int, query_len: int, context_len: int) -> float:
    kernels = TritonKernels()
    num_blocks = 1 + batch_size * num_blocks_of(context_len, BLOCK_SIZE)
    kv_layer = KvLayer(_randn(num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE))
    q = _randn(batch_size * query_len, NUM_HEADS, HEAD_SIZE)
    batch = shuffled_batch(batch_size, query_len, context_len, num_blocks)
    return seconds(lambda: kernels.attention(q, kv_layer, batch, HEAD_SIZE**-0.5))


def _torch_attention_seconds(length: int) -> float:
    q, k, v = _randn(1, NUM_HEADS, length, HEAD_SIZE), *_randn(2, 1, NUM_KV_HEADS, length, HEAD_SIZE)
    return seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")
