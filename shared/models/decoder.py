"""The decoder: one definition for all Llama-shaped models, over flattened tokens and a paged KV pool.

    x = embed(ids)
    per layer:  x += o(attention(rope(qkv(norm(x)))))
                x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

`residual` is x; each norm is fused with the addition before it. Axes as in `shared/kernels/interface.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shared.kernels.interface import AttentionBatch, Kernels
from shared.kernels.kv_layout import KvLayer
from shared.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Linear:
    packed: Any  # what `Kernels.pack_linear` made of [E_out, E_in]
    bias: Tensor | None = None  # [E_out]


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor  # [E]
    qkv: Linear  # rows: Hq query heads, Hkv key heads, Hkv value heads
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Linear
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # rows: gate, up
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Any  # what `Kernels.pack_linear` made of [V, E]
    layers: tuple[Layer, ...]
    norm: Tensor  # [E]
    head: Linear  # [V, E]
    cos_sin: Tensor  # [max_model_len, 2, R / 2] float32


class Decoder:
    """Bound to the kernels that packed its weights."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        self.config = config
        self.kernels = kernels
        self._weights = weights
        self._scale = config.head_dim**-0.5

    def forward(
        self,
        token_ids: Tensor,
        kv_layers: Sequence[KvLayer],
        batch: AttentionBatch,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """token_ids [T] int64 -> normalized hidden states [T, E]. Writes the tokens' K and V to the pool, one view per layer.

        `on_layer` is called with how many layers' K and V have been written: computed on a CPU, launched on a GPU."""
        weights, kernels, eps = self._weights, self.kernels, self.config.rms_norm_eps
        residual = kernels.embedding(token_ids, weights.embed)
        x = kernels.rms_norm(residual, weights.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            x = self._attention(layer, x, kv_layers[i], batch, self.config.windows[i])
            if on_layer is not None:
                on_layer(i + 1)
            x = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._linear(layer.down, kernels.silu_mul(self._linear(layer.gate_up, x)))
            x = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [N, E], rows of what `forward` returned -> [N, V] float32, in `out` if given."""
        logits = self._linear(self._weights.head, hidden)
        return logits.float() if out is None else out.copy_(logits)

    def _attention(self, layer: Layer, x: Tensor, kv_layer: KvLayer, batch: AttentionBatch, window: int) -> Tensor:
        config, kernels = self.config, self.kernels
        heads = self._linear(layer.qkv, x).view(len(x), -1, config.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        kernels.rope_store(q, k, v, self._weights.cos_sin, kv_layer, batch)
        mixed = kernels.attention(q, kv_layer, batch, self._scale, window)
        return self._linear(layer.o, mixed)

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        return self.kernels.linear(x, linear.packed, linear.bias)
