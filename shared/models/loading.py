"""From files to a `Decoder`: checks names and shapes first, then fills one fused, packed matrix after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.interface import Kernels
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder, Layer, Linear, Weights
from shared.models.rope import cos_sin_table

_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"
_NORM = "model.norm.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration has."""
    hidden, q_size, kv_size = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.up_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate_size, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for name, (rows, columns, has_bias) in matrices.items():
        layer |= {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if has_bias else {})
    shapes: dict[str, tuple[int, ...]] = {_EMBED: (config.vocab_size, hidden), _NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def load_decoder(
    config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Decoder:
    """Raises ConfigError if the checkpoint does not fit the configuration."""
    is_tied = config.tied_embeddings and not (_EMBED in checkpoint.shapes and _HEAD in checkpoint.shapes)
    if is_tied:  # one matrix, under either name
        checkpoint = checkpoint.with_alias(_HEAD, _EMBED) if _EMBED in checkpoint.shapes else checkpoint.with_alias(_EMBED, _HEAD)
    checkpoint.check(expected_shapes(config) | {_HEAD: (config.vocab_size, config.hidden_size)})
    if config.tied_embeddings and not is_tied:  # stored twice: if they differ, as after training the head alone, both count
        is_tied = torch.equal(checkpoint.read(_EMBED), checkpoint.read(_HEAD))
    loader = _Loader(config, checkpoint, kernels, dtype, device)
    embed = kernels.pack_linear(loader.tensor(_EMBED))
    weights = Weights(
        embed=embed,
        layers=tuple(loader.layer(f"model.layers.{i}.") for i in range(config.num_layers)),
        norm=loader.tensor(_NORM),
        head=Linear(embed) if is_tied else loader.linear(False, _HEAD.removesuffix(".weight")),
        cos_sin=cos_sin_table(config.inv_freq, config.rope_scale, max_model_len, device),
    )
    return Decoder(config, weights, kernels)


class _Loader:
    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, kernels: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def tensor(self, *names: str) -> Tensor:
        """The named tensors below each other in one new tensor, converted."""
        shapes = [self._checkpoint.shapes[name] for name in names]
        fused = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for part, name in zip(fused.split([s[0] for s in shapes]), names, strict=True):
            part.copy_(self._checkpoint.read(name))
        return fused

    def linear(self, has_bias: bool, *names: str) -> Linear:
        packed = self._kernels.pack_linear(self.tensor(*(f"{name}.weight" for name in names)))
        return Linear(packed, self.tensor(*(f"{name}.bias" for name in names)) if has_bias else None)

    def layer(self, prefix: str) -> Layer:
        config, attention, mlp = self._config, f"{prefix}self_attn.", f"{prefix}mlp."
        return Layer(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self.linear(config.qkv_bias, f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
            q_norm=self.tensor(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self.tensor(f"{attention}k_norm.weight") if config.qk_norm else None,
            o=self.linear(config.o_bias, f"{attention}o_proj"),
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.linear(config.mlp_bias, f"{mlp}gate_proj", f"{mlp}up_proj"),
            down=self.linear(config.mlp_bias, f"{mlp}down_proj"),
        )
