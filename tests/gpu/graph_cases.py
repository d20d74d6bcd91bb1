"""Captured launches on the GPU: what was recorded for the longest contexts stays right for all others.

Run by `python -m bench.kernels.gpu_check`; the name keeps pytest from collecting it where there is no GPU.
"""

from __future__ import annotations

import random

import pytest
import torch

from shared.engine.compute.decode_graphs import CudaCapture
from shared.kernels.interface import AttentionBatch
from shared.kernels.reference import ReferenceKernels
from shared.kernels.triton import TritonKernels

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, MAX_NUM_BLOCKS, NUM_BLOCKS = 8, 2, 64, 16, 256, 600
SCALE = HEAD_SIZE**-0.5
DEVICE = "cuda"


def random_batch(context_lens: list[int], rng: random.Random) -> AttentionBatch:
    """One query for each sequence; tables are as wide as they may get."""
    num_seqs = len(context_lens)
    tables = torch.tensor([[rng.randrange(1, NUM_BLOCKS) for _ in range(MAX_NUM_BLOCKS)] for _ in context_lens], dtype=torch.int32)
    positions = torch.tensor([max(0, n - 1) for n in context_lens])
    slots = tables[torch.arange(num_seqs), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        positions=positions.to(DEVICE),
        slots=slots.to(DEVICE),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        block_tables=tables.to(DEVICE),
        num_single=num_seqs,
        max_query_len=1,
        max_context_len=MAX_NUM_BLOCKS * BLOCK_SIZE,
    )


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("num_seqs", [1, 3, 8])
@torch.inference_mode()
def test_captured_attention_follows_the_contexts_of_each_replay(num_seqs: int, window: int) -> None:
    rng, kernels = random.Random(num_seqs), TritonKernels()
    kv_layer = torch.randn(NUM_BLOCKS, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, device=DEVICE)[:, 0]
    q, out = torch.zeros(num_seqs, NUM_HEADS, HEAD_SIZE, device=DEVICE), torch.zeros(num_seqs, NUM_HEADS * HEAD_SIZE, device=DEVICE)
    batch = random_batch([0] * num_seqs, rng)

    def attend() -> None:
        out.copy_(kernels.attention(q, kv_layer, batch, SCALE, window))

    replay = CudaCapture()(attend)
    for longest in (1, 17, 300, 1025, MAX_NUM_BLOCKS * BLOCK_SIZE, 40):
        now = random_batch([longest, *(rng.randint(1, longest) for _ in range(num_seqs - 1))], rng)
        q.normal_()
        batch.context_lens.copy_(now.context_lens)
        batch.block_tables.copy_(now.block_tables)
        out.fill_(torch.nan)
        replay()
        expected = ReferenceKernels().attention(q, kv_layer, now, SCALE, window)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
