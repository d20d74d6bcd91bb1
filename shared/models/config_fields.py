"""Which fields of a model's configuration are known, so that none that changes values is passed over.

A field is handled by `shared/models/config.py`, or harmless (training, generation, bookkeeping), or off (null, false, zero, empty).
Anything else might change what the model computes, and the model is refused with the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.base.errors import ConfigError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HANDLED = _names(
    "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act max_position_embeddings original_max_position_embeddings rms_norm_eps "
    "rope_parameters rope_scaling rope_theta partial_rotary_factor attention_bias mlp_bias tie_word_embeddings "
    "sliding_window use_sliding_window max_window_layers layer_types quantization_config"
)
_TRAINING = _names(
    "initializer_range attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob attn_pdrop "
    "embd_pdrop resid_pdrop classifier_dropout gradient_checkpointing neftune_noise_alpha pretraining_tp use_cache "
    "finetuning_task id2label label2id num_labels problem_type task_specific_params unsloth_fixed unsloth_version"
)
_GENERATION = _names(
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids do_sample temperature "
    "top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "diversity_penalty num_beams num_beam_groups num_return_sequences max_length min_length max_new_tokens "
    "early_stopping exponential_decay_length_penalty remove_invalid_values return_dict_in_generate output_scores"
)
_BOOKKEEPING = _names(
    "transformers_version torch_dtype dtype auto_map tokenizer_class transformers.js_config attn_implementation "
    "return_dict output_attentions output_hidden_states chunk_size_feed_forward is_llama_config model_max_length "
    "max_sequence_length seq_length max_seq_len prefix use_flash_attn use_flash_attention"
)
_KNOWN = _HANDLED | _TRAINING | _GENERATION | _BOOKKEEPING

# rope_type -> what it cannot do without. Left out: "longrope", whose frequencies change with a sequence's length, so that its
# cached keys would have to be rotated again. "dynamic" does so too, but only past the model's own length, which is the limit.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_FIELDS = _names(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate low_freq_factor high_freq_factor partial_rotary_factor finetuned"
)

_GGUF_FIELDS = _names(
    "context_length embedding_length block_count feed_forward_length vocab_size attention.head_count "
    "attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length rope.freq_base "
    "rope.dimension_count"
)


def check_fields(config: Mapping[str, Any]) -> None:
    """Of config.json. Raises ConfigError."""
    unknown = {name: value for name, value in config.items() if value and name not in _KNOWN and not name.startswith("_")}
    if unknown:
        raise _might_change(unknown, "config.json")
    check_rope(config.get("rope_parameters") or config.get("rope_scaling") or {})


def check_rope(rope: Any) -> None:
    """Of `rope_parameters`, or `rope_scaling` in older files. Raises ConfigError."""
    if not isinstance(rope, Mapping):
        raise ConfigError(f"the model's rope_parameters are {rope!r}; they must be a JSON object")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPE_NEEDS:
        raise ConfigError(f"the model's rope_type is {rope_type!r}; supported are {', '.join(_ROPE_NEEDS)}")
    unknown = {name: value for name, value in rope.items() if value and name not in _ROPE_FIELDS}
    if unknown:
        raise _might_change(unknown, "rope_parameters")
    for name in _ROPE_NEEDS[rope_type]:
        value = rope.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"the model's rope_parameters have {name} {value!r}; rope_type {rope_type!r} needs a number above 0")


def check_gguf_fields(metadata: Mapping[str, Any], head_dim: int) -> None:
    """Of a GGUF file: those that describe its architecture, of which transformers reads some. Raises ConfigError."""
    prefix = f"{metadata.get('general.architecture')}."
    fields = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    if fields.get("rope.scaling.type") == "none":
        fields = {name: value for name, value in fields.items() if not name.startswith("rope.scaling.")}
    unknown = {prefix + name: value for name, value in fields.items() if value and name not in _GGUF_FIELDS}
    if unknown:
        raise _might_change(unknown, "the GGUF file")
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if fields.get(name, head_dim) != head_dim:
            raise ConfigError(
                f"{prefix}{name} of the GGUF file is {fields[name]}; only the size of a head, {head_dim}, is supported"
            )


def _might_change(fields: Mapping[str, Any], where: str) -> ConfigError:
    named = ", ".join(f"{name} ({value!r})" if isinstance(value, int | float | str) else name for name, value in fields.items())
    return ConfigError(f"{where} has fields that might change what the model computes and are not supported: {named}")
