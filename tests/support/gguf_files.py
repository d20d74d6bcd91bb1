"""GGUF files as llama.cpp writes them: a tiny qwen2 in float32, and the tiny tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from tests.support.tiny_tokenizer import EOS_ID, SPECIAL_TOKENS, TEMPLATE, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_model(model: PreTrainedModel, file: Path, add: Callable[[gguf.GGUFWriter], object] = lambda writer: None) -> Path:
    """A qwen2 model by the names that llama.cpp gives, with what `add` writes besides. Returns `file`."""
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.config.num_hidden_layers)
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    add(writer)
    return _finish(writer, file)


def write_tokenizer(file: Path, **fields: Any) -> Path:
    """No weights, only the tiny tokenizer. `fields` replace those of `tokenizer.ggml.`; None leaves one out. Returns `file`."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    types = dict.fromkeys(SPECIAL_TOKENS, _CONTROL) | {"<tool>": _USER_DEFINED, "été": _USER_DEFINED}
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(token, _NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_chat_template(fields.pop("chat_template", TEMPLATE))
    fields = {"pre": "gpt-2", "eos_token_id": EOS_ID, "eot_token_id": 0} | fields
    for name, value in fields.items():
        if value is not None:
            add = writer.add_string if isinstance(value, str) else writer.add_bool if isinstance(value, bool) else writer.add_uint32
            add(f"tokenizer.ggml.{name}", value)
    return _finish(writer, file)


def _finish(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
