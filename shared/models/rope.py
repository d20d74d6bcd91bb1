"""Rotary position embeddings (Su et al. 2021, RoFormer): a model's frequencies, and the table that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(hf: Any) -> tuple[tuple[float, ...], float]:
    """(R / 2 inverse frequencies, factor on cos and sin) of a transformers configuration, scaling
    included. Its `rope_parameters` have passed `check_rope`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = hf.rope_parameters["rope_type"]
    if rope_type == "default":
        dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / hf.rope_parameters["rope_theta"] ** exponents).tolist()), 1.0
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](hf, torch.device("cpu"))
    return tuple(inv_freq.tolist()), float(scale)


def cos_sin_table(inv_freq: Sequence[float], scale: float, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, 2, R / 2] float32: cos (0) and sin (1) of position times frequency, both times `scale`."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions.unsqueeze(1) * torch.tensor(inv_freq, dtype=torch.float32)
    return (torch.stack((angles.cos(), angles.sin()), dim=1) * scale).to(device)
