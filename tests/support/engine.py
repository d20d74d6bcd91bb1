"""Tiny models with random weights, made by transformers, and a hand on the engine's lower half: plans without a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from shared.base.request import Request, SamplingParams
from shared.base.worker_info import Role
from shared.engine.compute.runner import ModelRunner
from shared.engine.load import load_runner
from shared.engine.schedule.plan import ScheduledSequence
from shared.engine.schedule.sequence import Sequence
from shared.options.worker import WorkerConfig

VOCAB_SIZE = 199
WINDOW = 12  # of the kinds "mistral" and "qwen2-window"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def _config(kind: str) -> PreTrainedConfig:
    match kind:
        case "llama":
            return LlamaConfig(**_SHAPE, tie_word_embeddings=False)
        case "llama-tied":
            return LlamaConfig(**_SHAPE, tie_word_embeddings=True)
        case "llama-biased":
            return LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True)
        case "llama3-rope":
            return LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3)
        case "yarn":
            return LlamaConfig(**_SHAPE, rope_parameters=_YARN)
        case "mistral":
            return MistralConfig(**_SHAPE, sliding_window=WINDOW)
        case "qwen2":
            return Qwen2Config(**_SHAPE)
        case "qwen2-window":
            return Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
        case "qwen3":
            return Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True)
    raise ValueError(kind)


KINDS = ("llama", "llama-tied", "llama-biased", "llama3-rope", "yarn", "mistral", "qwen2", "qwen2-window", "qwen3")


def make_tiny_model(kind: str, folder: Path, **save_options: Any) -> PreTrainedModel:
    """Saves a model of one of `KINDS` to `folder` (safetensors) and returns it: float32, the same weights each time, far enough
    from zero that greedy tokens are not all alike."""
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3 if weight.dim() == 1 else 1.5 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder, **save_options)
    return model


def tiny_runner(folder: Path, role: Role = Role.COLOCATED, **options: Any) -> ModelRunner:
    """A runner of the model in `folder` with the reference kernels and one thread, unless `options` say otherwise."""
    defaults: dict[str, Any] = {"device": "cpu", "kernels": "reference", "num_threads": 1, "num_blocks": 64, "max_model_len": 256}
    return load_runner(WorkerConfig(model=str(folder), **(defaults | options)), role)


def make_sequence(token_ids: list[int], first_block: int, num_blocks: int, sampling: SamplingParams | None = None) -> Sequence:
    """A sequence that owns num_blocks consecutive blocks."""
    request = Request(f"request-{first_block}", token_ids, len(token_ids), sampling or SamplingParams(temperature=0.0))
    sequence = Sequence(request)
    sequence.block_table = list(range(first_block, first_block + num_blocks))
    return sequence


def schedule(sequence: Sequence, num_tokens: int | None = None) -> ScheduledSequence:
    """The sequence's next num_tokens tokens (default: all uncomputed ones); it samples when they are the last."""
    count = num_tokens or sequence.num_uncomputed_tokens
    start = sequence.num_computed_tokens
    return ScheduledSequence(sequence, start, count, 1 if start + count == sequence.num_tokens else 0)
