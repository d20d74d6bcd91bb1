"""What the decoder needs to know of a model, as plain values read once from a transformers configuration.

Llama, Mistral, Qwen2 and Qwen3 are one decoder that differs in a few switches: where biases are, whether queries and keys are
normalized, and which layers see only a window. `_FAMILIES` has one line for each. Everything else is refused by name: a model
type, an architecture, a field that might change what is computed (`shared/models/config_fields.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shared.base.errors import ConfigError
from shared.models.config_fields import check_fields, check_gguf_fields, check_rope
from shared.models.gguf import read_floats, read_metadata
from shared.models.locate import ModelFiles
from shared.models.rope import inverse_frequencies

_ROPE_FREQS = "rope_freqs.weight"  # in GGUF files: what each frequency is divided by
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_ACTIVATIONS = ("silu", "swish")  # two names of one function


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    windows: Literal["none", "all layers", "by layer"]
    qkv_bias: Callable[[Any], bool] = lambda hf: False
    o_bias: Callable[[Any], bool] = lambda hf: False
    mlp_bias: Callable[[Any], bool] = lambda hf: False
    qk_norm: bool = False


def _attention_bias(hf: Any) -> bool:
    return bool(hf.attention_bias)


# By model type. A Llama's attention is full: where its configuration has a `sliding_window`, left over from another model, that is
# ignored, as in transformers' forward pass and in vLLM. (transformers' `generate` drops keys for it, unlike its forward pass.)
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "none", _attention_bias, _attention_bias, mlp_bias=lambda hf: bool(hf.mlp_bias)),
    "mistral": _Family("MistralForCausalLM", "all layers"),
    "qwen2": _Family("Qwen2ForCausalLM", "by layer", qkv_bias=lambda hf: True),
    "qwen3": _Family("Qwen3ForCausalLM", "by layer", _attention_bias, _attention_bias, qk_norm=True),
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
    tied_embeddings: bool  # one matrix is embedding and head, unless the checkpoint holds two different ones

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.windows) == self.num_layers


def read_config(files: ModelFiles) -> ModelConfig:
    """Raises ConfigError, in one line, if the configuration cannot be read or asks for what the decoder does not do."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _check_family(files.config.get("model_type"), files.config.get("architectures"))
    check_fields(files.config)
    try:
        hf = AutoConfig.from_pretrained(files.folder, **({"gguf_file": files.gguf_file} if files.gguf_file else {}))
    except (StrictDataclassError, ValueError, KeyError, OSError, TypeError, AttributeError, ArithmeticError) as error:
        source = files.folder / (files.gguf_file or "config.json")
        raise ConfigError(f"{source} cannot be read: {' '.join(str(error).split())}") from None
    if not files.gguf_file:
        return from_transformers(hf)
    path = files.folder / files.gguf_file
    check_gguf_fields(read_metadata(path), _head_dim(hf))
    return from_transformers(hf, read_floats(path, _ROPE_FREQS))


def from_transformers(hf: Any, rope_divisors: tuple[float, ...] | None = None) -> ModelConfig:
    """`rope_divisors`, R / 2 of them, divide RoPE's frequencies. Raises ConfigError."""
    family = _check_family(hf.model_type, hf.architectures)
    _check_values(hf)
    check_rope(hf.rope_parameters)
    inv_freq, rope_scale = inverse_frequencies(hf)
    if rope_divisors is not None:
        if len(rope_divisors) != len(inv_freq):
            raise ConfigError(
                f"{_ROPE_FREQS} has {len(rope_divisors)} numbers; half the size of a head, {len(inv_freq)}, is needed"
            )
        inv_freq = tuple(frequency / divisor for frequency, divisor in zip(inv_freq, rope_divisors, strict=True))
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
        windows=_windows(hf, family),
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        qkv_bias=family.qkv_bias(hf),
        o_bias=family.o_bias(hf),
        mlp_bias=family.mlp_bias(hf),
        qk_norm=family.qk_norm,
        tied_embeddings=hf.tie_word_embeddings,
    )


def _check_family(model_type: Any, architectures: Any) -> _Family:
    """A configuration may name no architecture; one that it names must be its model type's. Raises ConfigError."""
    if model_type not in _FAMILIES:
        named = f" ({', '.join(map(str, architectures))})" if isinstance(architectures, list) and architectures else ""
        raise ConfigError(f"model type {model_type!r}{named} is not supported; supported are {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    if architectures and family.architecture not in architectures:
        raise ConfigError(f"model type {model_type!r} goes with {family.architecture}, but architectures is {architectures!r}")
    return family


def _check_values(hf: Any) -> None:
    for name in _SIZES:
        if getattr(hf, name) < 1:
            raise ConfigError(f"the model's {name} is {getattr(hf, name)}; it must be at least 1")
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ConfigError(
            f"the model's num_attention_heads, {hf.num_attention_heads}, is not a multiple of its num_key_value_heads, "
            f"{hf.num_key_value_heads}"
        )
    if _head_dim(hf) < 2 or _head_dim(hf) % 2:
        raise ConfigError(f"the model's head_dim is {_head_dim(hf)}; it must be even")
    if not hf.rms_norm_eps > 0:
        raise ConfigError(f"the model's rms_norm_eps is {hf.rms_norm_eps}; it must be above 0")
    if hf.hidden_act not in _ACTIVATIONS:
        raise ConfigError(f"the model's hidden_act is {hf.hidden_act!r}; only 'silu' is supported")
    if getattr(hf, "quantization_config", None):
        raise ConfigError("the model's weights are quantized (quantization_config); only float checkpoints are supported")
    if hf.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("the model's partial_rotary_factor is not 1; only full rotary embeddings are supported")


def _head_dim(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def _max_position(hf: Any) -> int:
    """Linear scaling stretches the length that the configuration states. YaRN checkpoints state either length, the one before or
    the one after scaling; the longer one holds."""
    rope, length = hf.rope_parameters, int(hf.max_position_embeddings)
    if rope["rope_type"] == "linear":
        return int(length * rope["factor"])
    if rope["rope_type"] == "yarn":
        return max(length, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return length


def _windows(hf: Any, family: _Family) -> tuple[int, ...]:
    window: int = getattr(hf, "sliding_window", None) or 0
    stated: list[str] = getattr(hf, "layer_types", None) or []
    if family.windows == "by layer":
        if len(stated) != hf.num_hidden_layers or not set(stated) <= {"full_attention", "sliding_attention"}:
            raise ConfigError(
                f"the model's layer_types are {stated}; {hf.num_hidden_layers} full_attention or sliding_attention are supported"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in stated)
    if set(stated) - {"full_attention"}:
        raise ConfigError(f"the model's layer_types are {stated}; model type {hf.model_type!r} has no windows by layer")
    return tuple(window if family.windows == "all layers" else 0 for _ in range(hf.num_hidden_layers))
