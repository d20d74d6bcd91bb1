"""A model's configuration: what is taken from it, and one line that names what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import GemmaConfig, LlamaConfig

from shared.base.errors import ConfigError
from shared.models.config import ModelConfig, from_transformers, read_config
from shared.models.locate import locate
from tests.support.engine import make_tiny_model
from tests.support.gguf_files import write_model
from tests.support.tiny_model import save_tiny_model


def changed(folder: Path, **fields: Any) -> Path:
    """The tiny Llama with other fields in its config.json; None takes one out."""
    save_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return folder


def read(folder: Path) -> ModelConfig:
    return read_config(locate(str(folder)))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_plain_model_is_read(tmp_path):
    config = read(changed(tmp_path))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size, config.max_position) == (48, 80, 448, 512)
    assert (config.rms_norm_eps, config.tied_embeddings, config.windows) == (1e-6, False, (0, 0, 0))
    assert [config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm] == [False] * 4


# Which model it is


@pytest.mark.parametrize("model_type", ["granite", "helium", "gemma2", "olmo", "phi3", "cohere", "qwen2_moe", "gpt2", "unheard-of"])
@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], None])
def test_a_model_type_that_is_not_supported_is_refused_by_name_whatever_architecture_it_claims(model_type, architectures, tmp_path):
    named = refusal(changed(tmp_path, model_type=model_type, architectures=architectures))
    assert named.startswith(f"model type '{model_type}'")
    assert named.endswith("is not supported; supported are llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "MistralForCausalLM", "LlamaForSequenceClassification"])
def test_an_architecture_of_another_model_type_is_refused(architecture, tmp_path):
    expected = f"model type 'llama' goes with LlamaForCausalLM, but architectures is ['{architecture}']"
    assert refusal(changed(tmp_path, architectures=[architecture])) == expected


def test_a_configuration_without_architectures_is_its_model_types(tmp_path):
    assert read(changed(tmp_path, architectures=None)) == read(changed(tmp_path))


def test_a_transformers_configuration_is_refused_the_same_way():
    with pytest.raises(ConfigError, match="model type 'gemma'"):
        from_transformers(GemmaConfig())


# Fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8.0),
        ("attention_multiplier", 1.0),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("clip_qkv", 8.0),
        ("no_rope_layers", [1, 0, 1]),
        ("num_experts", 8),
        ("per_layer_config", {"0": {"num_key_value_heads": 1}}),
        ("norm_type", "layernorm"),
        ("parallel_attn", True),
    ],
)
def test_a_field_that_might_change_values_is_refused_by_name(field, value, tmp_path):
    named = refusal(changed(tmp_path, **{field: value}))
    assert "might change what the model computes" in named
    assert field in named


def test_harmless_fields_and_those_that_are_off_are_taken(tmp_path):
    plain = read(changed(tmp_path))
    harmless = {
        "attention_dropout": 0.1, "initializer_range": 0.04, "pretraining_tp": 2, "use_cache": False, "pad_token_id": 3,
        "torch_dtype": "bfloat16", "transformers_version": "4.1.0", "_name_or_path": "x/y", "is_llama_config": True,
        "transformers.js_config": {"dtype": "q4"}, "temperature": 0.6, "attn_logit_softcapping": False, "clip_qkv": 0,
        "auto_map": {"AutoModel": "x"}, "rope_interleaved": False, "id2label": {"0": "a"}, "hidden_act": "swish",
    }  # fmt: skip
    assert read(changed(tmp_path, **harmless)) == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; it must be above 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; it must be above 0"),
        ({"num_key_value_heads": 4}, "num_attention_heads, 6, is not a multiple of its num_key_value_heads, 4"),
        ({"num_key_value_heads": 12}, "num_attention_heads, 6, is not a multiple of its num_key_value_heads, 12"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"vocab_size": -1}, "vocab_size is -1; it must be at least 1"),
        ({"num_attention_heads": 0}, "config.json cannot be read"),
        ({"num_attention_heads": 7}, "is not a multiple of"),
        ({"head_dim": 7}, "even rotary dimension"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"rope_scaling": "yarn"}, "rope_parameters are 'yarn'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}},
         "rope_type is 'longrope'; supported are default, linear, dynamic, yarn, llama3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor None; rope_type 'yarn' needs a number above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor '4'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0; rope_type 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": True}}, "factor True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq_factor None"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8}, "layer_types"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_supported_or_makes_no_sense_is_one_line_that_names_it(fields, named, tmp_path):
    assert named in refusal(changed(tmp_path, **fields))


# Lengths, windows, frequencies


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
        (None, 512),
    ],
)
def test_linear_scaling_and_yarn_stretch_the_longest_sequence(rope, longest, tmp_path):
    assert read(changed(tmp_path, rope_scaling=rope)).max_position == longest


def test_windows_are_those_of_the_model_type(tmp_path):
    assert read(changed(tmp_path, sliding_window=12)).windows == (0, 0, 0)
    full = ["full_attention"] * 3
    assert read(changed(tmp_path, sliding_window=12, layer_types=full)).windows == (0, 0, 0)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 12}
    assert read(changed(tmp_path, **mistral)).windows == (12, 12, 12)
    assert "'ministral'" in refusal(changed(tmp_path, **mistral, layer_types=full))  # as transformers reads it
    qwen = {"model_type": "qwen2", "architectures": None, "sliding_window": 12}
    assert read(changed(tmp_path, **qwen, max_window_layers=1)).windows == (0, 0, 0)
    assert read(changed(tmp_path, **qwen, use_sliding_window=True, max_window_layers=1)).windows == (0, 12, 12)
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(changed(tmp_path, **qwen, use_sliding_window=True, layer_types=mixed)).windows == (12, 0, 12)
    assert "layer_types" in refusal(changed(tmp_path, **qwen, layer_types=["chunked_attention"] * 3))
    assert "layer_types" in refusal(changed(tmp_path, **qwen, layer_types=full[:2]))


# GGUF


def gguf_with(folder: Path, add: Any) -> Path:
    """A tiny qwen2 as a GGUF file, with what `add` writes besides."""
    model = make_tiny_model("qwen2", folder / "safetensors")
    return write_model(model, folder / "tiny.gguf", add)


def test_a_gguf_files_field_that_would_be_passed_over_is_refused_by_name(tmp_path):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    named = refusal(gguf_with(tmp_path, add))
    assert "qwen2.rope.scaling.type ('yarn'), qwen2.rope.scaling.factor (4.0)" in named


def test_a_gguf_file_says_the_size_of_a_head_only_as_it_is(tmp_path):
    assert read(gguf_with(tmp_path, lambda writer: writer.add_key_length(8))).head_dim == 8
    assert "qwen2.attention.key_length of the GGUF file is 16" in refusal(gguf_with(tmp_path, lambda w: w.add_key_length(16)))
    file = gguf_with(tmp_path, lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE))
    assert read(file).head_dim == 8


def test_a_gguf_files_divisors_of_frequencies_are_applied(tmp_path):
    """llama.cpp stores llama3's scaling of RoPE as a tensor; transformers computes the same from the configuration."""
    plain = read(gguf_with(tmp_path, lambda writer: None))
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    expected = from_transformers(
        LlamaConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=3, rope_parameters=scaling, architectures=None)
    )
    divisors = np.array(plain.inv_freq, np.float32) / np.array(expected.inv_freq, np.float32)
    assert divisors.max() > 7
    scaled = read(gguf_with(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))))
    torch.testing.assert_close(torch.tensor(scaled.inv_freq), torch.tensor(expected.inv_freq))
    wrong = gguf_with(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(5, np.float32)))
    assert "rope_freqs.weight has 5 numbers" in refusal(wrong)
    halves = gguf_with(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float16)))
    assert "rope_freqs.weight of" in refusal(halves)
