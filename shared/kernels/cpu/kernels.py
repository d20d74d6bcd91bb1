"""The CPU backend of the kernel interface: compiled C++, and torch's matrix product where the CPU multiplies bfloat16 natively."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cpu.build import load_native
from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import KvLayer

# Where torch itself multiplies bfloat16 fast, only reading the weights is left to save.
_FEW_ROWS_OF_FAST_BF16 = 8


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight as `panels.h` lays it out. A row's product has the same bits however many other rows there are.

    Float32 weights that are bfloat16 ones widened, as those of most checkpoints, are kept as bfloat16: the same products for half
    the memory traffic, which is what a step of few rows costs.
    """

    values: Tensor
    num_outputs: int
    dtype: torch.dtype  # of the weight that was packed


class CpuKernels:
    """Float32 or bfloat16. The first instance on a machine compiles the kernels; raises CannotBuild (an ImportError)."""

    name = "cpu"
    is_capturable = False

    def __init__(self) -> None:
        self._native = load_native()
        # Without instructions for it torch multiplies bfloat16 at a tenth of float32's speed.
        self._multiplies_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def pack_linear(self, weight: Tensor) -> Panels | Tensor:
        if weight.dtype == torch.bfloat16 and self._multiplies_bf16:
            return weight.contiguous()
        narrow = weight.bfloat16()
        values = narrow if torch.equal(narrow.float(), weight.float()) else weight
        return Panels(self._native.pack_panels(values.contiguous()), len(weight), weight.dtype)

    def linear(self, x: Tensor, packed: Panels | Tensor, bias: Tensor | None = None) -> Tensor:
        if isinstance(packed, Panels):
            return self._native.linear(x.contiguous(), packed.values, packed.num_outputs, bias)
        if len(x) <= _FEW_ROWS_OF_FAST_BF16:
            return self._native.linear_few_bf16(x.contiguous(), packed, bias)
        return F.linear(x, packed, bias)

    def embedding(self, token_ids: Tensor, packed: Panels | Tensor) -> Tensor:
        if isinstance(packed, Panels):
            return self._native.panel_rows(packed.values, token_ids).to(packed.dtype)
        return F.embedding(token_ids, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._native.rms_norm(x.contiguous(), weight, eps)  # heads may be views of a fused projection

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._native.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._native.silu_mul(gate_up)

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_layer: KvLayer, batch: AttentionBatch) -> None:
        self._native.rope_store(q, k, v, cos_sin, kv_layer.values, kv_layer.scales, batch.positions, batch.slots)

    def attention(
        self, q: Tensor, kv_layer: KvLayer, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        return self._native.attention(
            q,
            kv_layer.values,
            kv_layer.scales,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            batch.num_single,
            scale,
            window,
            softcap,
        )

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        self._native.copy_blocks(pool, sources, targets)

    def gather_blocks(self, pool: Tensor, block_ids: Tensor) -> Tensor:
        return self._native.gather_blocks(pool, block_ids)

    def scatter_blocks(self, pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        self._native.scatter_blocks(pool, block_ids, blocks.contiguous())

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.all_greedy:
            return self._native.argmax(logits)
        return self._native.sample(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniforms)
