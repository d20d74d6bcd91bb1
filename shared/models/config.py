"""What the decoder needs to know of a model, as plain values read once from a transformers configuration.

Llama, Mistral, Qwen2 and Qwen3 are one decoder that differs in a few switches: where biases are, whether queries and keys are
normalized, and which layers see only a window. `_ARCHITECTURES` has one line for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.base.errors import ConfigError
from shared.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class _Switches:
    qkv_bias: Callable[[Any], bool] = lambda hf: False
    o_bias: Callable[[Any], bool] = lambda hf: False
    mlp_bias: Callable[[Any], bool] = lambda hf: False
    qk_norm: bool = False


_ARCHITECTURES = {
    "LlamaForCausalLM": _Switches(
        qkv_bias=lambda hf: hf.attention_bias, o_bias=lambda hf: hf.attention_bias, mlp_bias=lambda hf: hf.mlp_bias
    ),
    "MistralForCausalLM": _Switches(),
    "Qwen2ForCausalLM": _Switches(qkv_bias=lambda hf: True),
    "Qwen3ForCausalLM": _Switches(qkv_bias=lambda hf: hf.attention_bias, o_bias=lambda hf: hf.attention_bias, qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position: int  # longest sequence the model supports
    windows: tuple[int, ...]  # per layer: how many of the last keys a query sees, 0: all
    inv_freq: tuple[float, ...]  # of RoPE, R / 2 values
    rope_scale: float  # factor on cos and sin
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.windows) == self.num_layers


def read_config(folder: Path, gguf_file: str | None = None) -> ModelConfig:
    """The configuration of a model folder. Raises ConfigError if it cannot be read or asks for what the decoder does not do."""
    from transformers import AutoConfig

    source = folder / (gguf_file or "config.json")
    if not source.is_file():
        raise ConfigError(f"{folder} has no config.json: --model must be a folder with a model, a .gguf file or a hub id")
    try:
        hf = AutoConfig.from_pretrained(folder, **({"gguf_file": gguf_file} if gguf_file else {}))
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"{source} cannot be read: {str(error).splitlines()[0]}") from None
    return from_transformers(hf)


def from_transformers(hf: Any) -> ModelConfig:
    architecture = _architecture(hf)
    switches = _ARCHITECTURES.get(architecture)
    if switches is None:
        raise ConfigError(f"architecture {architecture} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    _check_features(hf)
    inv_freq, rope_scale = inverse_frequencies(hf)
    return ModelConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=_head_dim(hf),
        vocab_size=hf.vocab_size,
        rms_norm_eps=hf.rms_norm_eps,
        max_position=_max_position(hf),
        windows=_windows(hf),
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        qkv_bias=switches.qkv_bias(hf),
        o_bias=switches.o_bias(hf),
        mlp_bias=switches.mlp_bias(hf),
        qk_norm=switches.qk_norm,
        tied_embeddings=hf.tie_word_embeddings,
    )


def _architecture(hf: Any) -> str:
    """As the configuration names it; one that does not (from a GGUF file) means its model type's language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if hf.architectures:
        return str(hf.architectures[0])
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf.model_type, hf.model_type))


def _check_features(hf: Any) -> None:
    if hf.hidden_act != "silu":
        raise ConfigError(f"the model's hidden_act is {hf.hidden_act!r}; only 'silu' is supported")
    if getattr(hf, "quantization_config", None):
        raise ConfigError("the model's weights are quantized (quantization_config); only float checkpoints are supported")
    if hf.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("the model's partial_rotary_factor is not 1; only full rotary embeddings are supported")


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _max_position(hf: Any) -> int:
    """YaRN checkpoints state either length, the one before or the one after scaling; the longer one holds."""
    rope = hf.rope_parameters
    if rope["rope_type"] != "yarn":
        return int(hf.max_position_embeddings)
    return max(int(hf.max_position_embeddings), int(rope["original_max_position_embeddings"] * rope["factor"]))


def _windows(hf: Any) -> tuple[int, ...]:
    window = getattr(hf, "sliding_window", None) or 0
    layer_types = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
