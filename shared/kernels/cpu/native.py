"""The signatures of the compiled module, for the type checker. `ops.h` is its other side."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Native(Protocol):
    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        num_single: int,
        scale: float,
        window: int,
        softcap: float,
        /,
    ) -> Tensor: ...

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv: Tensor,
        scales: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        /,
    ) -> None: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...

    def silu_mul(self, gate_up: Tensor, /) -> Tensor: ...

    def linear(self, x: Tensor, panels: Tensor, num_outputs: int, bias: Tensor | None, /) -> Tensor: ...

    def linear_few_bf16(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...

    def linear_pairs(self, x: Tensor, panels: Tensor, num_outputs: int, bias: Tensor | None, /) -> Tensor: ...

    def pack_pairs(self, weight: Tensor, /) -> Tensor: ...

    def pair_rows(self, panels: Tensor, size: int, indices: Tensor, /) -> Tensor: ...

    def pack_panels(self, weight: Tensor, /) -> Tensor: ...

    def panel_rows(self, panels: Tensor, indices: Tensor, /) -> Tensor: ...

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor, /) -> None: ...

    def gather_blocks(self, pool: Tensor, block_ids: Tensor, /) -> Tensor: ...

    def scatter_blocks(self, pool: Tensor, block_ids: Tensor, blocks: Tensor, /) -> None: ...

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor, /
    ) -> Tensor: ...

    def argmax(self, logits: Tensor, /) -> Tensor: ...
