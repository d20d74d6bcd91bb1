"""A whole model folder of a few hundred kilobytes, tokenizer included, made without torch: for tests that start real processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.tiny_tokenizer import EOS_ID, save_tiny_tokenizer

MAX_MODEL_LEN = 512
_VOCAB_SIZE = 448  # at least the tokenizer's
_HIDDEN, _INTERMEDIATE, _NUM_LAYERS, _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 48, 80, 3, 6, 2, 8
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _NUM_LAYERS,
    "num_attention_heads": _NUM_HEADS,
    "num_key_value_heads": _NUM_KV_HEADS,
    "head_dim": _HEAD_DIM,
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": [0, EOS_ID],
}


def save_tiny_model(folder: Path, seed: int = 20) -> Path:
    """A llama with random weights, far enough from zero that its tokens are not all alike. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * 1.5 * columns**-0.5).astype(np.float32)

    def norm() -> NDArray[np.float32]:
        return rng.uniform(0.5, 1.5, _HIDDEN).astype(np.float32)

    q_size, kv_size = _NUM_HEADS * _HEAD_DIM, _NUM_KV_HEADS * _HEAD_DIM
    weights = {"model.embed_tokens.weight": matrix(_VOCAB_SIZE, _HIDDEN), "lm_head.weight": matrix(_VOCAB_SIZE, _HIDDEN)}
    weights["model.norm.weight"] = norm()
    for i in range(_NUM_LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(q_size, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_size, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_size, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(_HIDDEN, q_size),
            f"{layer}.mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
    save_file(weights, folder / "model.safetensors")
    return folder
