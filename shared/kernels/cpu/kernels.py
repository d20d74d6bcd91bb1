"""The CPU backend of the kernel interface: compiled C++, and torch's products of bfloat16 where the CPU has matrix tiles for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cpu.build import load_native
from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import KvLayer

# Where torch multiplies bfloat16 in matrix tiles, only reading the weights is left to save.
_FEW_ROWS_OF_FAST_BF16 = 8


class Bf16Layout(Enum):
    """How weights lie in memory for products of bfloat16."""

    PANELS = "panels"  # `panels.h`: the CPU has no instruction for bfloat16, and products are those of float32
    PAIRS = "pairs"  # `pairs.h`: it multiplies two pairs at a time (AVX512_BF16)
    ROWS = "rows"  # as they come: it has matrix tiles, and torch's products use them


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight as `panels.h` lays it out. A row's product has the same bits however many other rows there are.

    Float32 weights that are bfloat16 ones widened, as those of most checkpoints, are kept as bfloat16: the same products for half
    the memory traffic, which is what a step of few rows costs.
    """

    values: Tensor
    num_outputs: int
    dtype: torch.dtype  # of the weight that was packed


@dataclass(frozen=True, slots=True)
class PairPanels:
    """A bfloat16 weight as `pairs.h` lays it out. A row's product has the same bits however many other rows there are."""

    values: Tensor
    num_outputs: int
    num_inputs: int


Packed = Panels | PairPanels | Tensor


class CpuKernels:
    """Float32 or bfloat16. The first instance on a machine compiles the kernels; raises CannotBuild (an ImportError)."""

    name = "cpu"
    is_capturable = False

    def __init__(self, bf16_layout: Bf16Layout | None = None) -> None:
        """`bf16_layout`: the one that suits this CPU if None. All of them give right results on any."""
        self._native = load_native()
        self._bf16_layout = bf16_layout or _bf16_layout_of_cpu()

    def pack_linear(self, weight: Tensor) -> Packed:
        if weight.dtype == torch.bfloat16 and self._bf16_layout is Bf16Layout.ROWS:
            return weight.contiguous()
        if weight.dtype == torch.bfloat16 and self._bf16_layout is Bf16Layout.PAIRS:
            return PairPanels(self._native.pack_pairs(weight.contiguous()), *weight.shape)
        narrow = weight.bfloat16()
        values = narrow if torch.equal(narrow.float(), weight.float()) else weight
        return Panels(self._native.pack_panels(values.contiguous()), len(weight), weight.dtype)

    def linear(self, x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
        if isinstance(packed, PairPanels):
            return self._native.linear_pairs(x.contiguous(), packed.values, packed.num_outputs, bias)
        if isinstance(packed, Panels):
            return self._native.linear(x.contiguous(), packed.values, packed.num_outputs, bias)
        if len(x) <= _FEW_ROWS_OF_FAST_BF16:
            return self._native.linear_few_bf16(x.contiguous(), packed, bias)
        return F.linear(x, packed, bias)

    def embedding(self, token_ids: Tensor, packed: Packed) -> Tensor:
        if isinstance(packed, PairPanels):
            return self._native.pair_rows(packed.values, packed.num_inputs, token_ids)
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


def _bf16_layout_of_cpu() -> Bf16Layout:
    # Without instructions for it torch multiplies bfloat16 at a tenth of float32's speed.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Bf16Layout.PANELS
    has_pairs = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.cpu._is_avx512_bf16_supported()
    return Bf16Layout.PAIRS if has_pairs and not torch.cpu._is_amx_tile_supported() else Bf16Layout.ROWS
