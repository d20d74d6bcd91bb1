"""The CPU body of the kernel interface: compiled C++, with torch's matrix product where that is the faster one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cpu.build import load_native
from shared.kernels.interface import AttentionBatch, SamplingBatch

# Up to here the compiled product is as fast as torch's or faster (measured on AVX2: 1.04 to 2 times with float32, against float32
# products of widened weights 1.0 to 2.2 times with bfloat16), and a row gets the same bits however many others there are.
_FEW_ROWS = 64
# Where torch itself multiplies bfloat16 fast, only reading the weights is left to save.
_FEW_ROWS_OF_FAST_BF16 = 8


class CpuKernels:
    """Float32 or bfloat16. The first instance on a machine compiles the kernels; raises CannotBuild (an ImportError)."""

    name = "cpu"
    is_capturable = False

    def __init__(self) -> None:
        self._native = load_native()
        # Without instructions for it torch multiplies bfloat16 at a tenth of float32's speed.
        self._multiplies_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        is_bf16 = x.dtype == torch.bfloat16
        if len(x) <= (_FEW_ROWS_OF_FAST_BF16 if is_bf16 and self._multiplies_bf16 else _FEW_ROWS):
            return self._native.linear(x.contiguous(), packed, bias)
        if is_bf16 and not self._multiplies_bf16:
            return self._native.linear_widened(x, packed, bias)
        return F.linear(x, packed, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._native.rms_norm(x.contiguous(), weight, eps)  # heads may be views of a fused projection

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._native.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._native.silu_mul(gate_up)

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
        self._native.rope_store(q, k, v, cos_sin, kv_layer, batch.positions, batch.slots)

    def attention(
        self, q: Tensor, kv_layer: Tensor, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        return self._native.attention(
            q, kv_layer, batch.query_starts, batch.context_lens, batch.block_tables, batch.num_single, scale, window, softcap
        )

    def copy_blocks(self, kv: Tensor, sources: Tensor, targets: Tensor) -> None:
        self._native.copy_blocks(kv, sources, targets)

    def gather_blocks(self, kv: Tensor, block_ids: Tensor) -> Tensor:
        return self._native.gather_blocks(kv, block_ids)

    def scatter_blocks(self, kv: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        self._native.scatter_blocks(kv, block_ids, blocks.contiguous())

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.all_greedy:
            return self._native.argmax(logits)
        return self._native.sample(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniforms)
