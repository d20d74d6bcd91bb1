"""The GPU backend of the kernel interface: shapes are checked here and in the wrappers, the arithmetic is one file per idea."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import KvLayer
from shared.kernels.triton.activation import silu_mul_launch
from shared.kernels.triton.attention import attention_launches
from shared.kernels.triton.blocks import as_words, copy_runs_launch
from shared.kernels.triton.norm import rms_norm_launch
from shared.kernels.triton.rope_store import rope_store_launch
from shared.kernels.triton.sampling import sample_launch


class TritonKernels:
    """Implements `shared.kernels.interface.Kernels`. Nothing here waits for the device, and launch grids depend only on
    shapes and on the Python integers of a batch, so a step can be captured in a CUDA graph."""

    name = "triton"
    is_capturable = True

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, packed, bias)

    def embedding(self, token_ids: Tensor, packed: Tensor) -> Tensor:
        return F.embedding(token_ids, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rms_norm_launch(x, None, weight, eps, out).run()
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rms_norm_launch(x, residual, weight, eps, out).run()
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        silu_mul_launch(gate_up, out).run()
        return out

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_layer: KvLayer, batch: AttentionBatch) -> None:
        rope_store_launch(q, k, v, cos_sin, kv_layer, batch).run()

    def attention(
        self, q: Tensor, kv_layer: KvLayer, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        for launch in attention_launches(q, kv_layer, batch, out, scale, window, softcap):
            launch.run()
        return out

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        words = as_words(pool)
        copy_runs_launch(words, words, sources, targets, len(sources)).run()

    def gather_blocks(self, pool: Tensor, block_ids: Tensor) -> Tensor:
        out = pool.new_empty((len(block_ids), *pool.shape[1:]))
        copy_runs_launch(as_words(pool), as_words(out), block_ids, None, len(block_ids)).run()
        return out

    def scatter_blocks(self, pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        copy_runs_launch(as_words(blocks), as_words(pool), None, block_ids, len(block_ids)).run()

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        sample_launch(logits, batch, out).run()
        return out
