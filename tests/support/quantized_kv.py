"""Pools of one-byte types, made from pools of floats."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.kv_layout import KvLayer, typed_views
from shared.kernels.reference import quantize

ONE_BYTE_TYPES = [torch.int8, torch.float8_e4m3fn]


def empty_layer(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"
) -> KvLayer:
    """A pool of one layer, all zero."""
    extra = 4 if dtype in ONE_BYTE_TYPES else 0
    head_bytes = block_size * (head_dim * dtype.itemsize + extra)
    runs = torch.zeros(num_blocks, 2, num_kv_heads, head_bytes, dtype=torch.uint8, device=device)
    return KvLayer(*typed_views(runs, dtype, block_size, head_dim))


def quantized_layer(floats: Tensor, dtype: torch.dtype) -> KvLayer:
    """floats [NB, 2, Hkv, BS, D] as a pool of `dtype`. What is NaN gets a NaN scale."""
    num_blocks, _, num_kv_heads, block_size, head_dim = floats.shape
    layer = empty_layer(num_blocks, num_kv_heads, block_size, head_dim, dtype, floats.device.type)
    assert layer.scales is not None
    values, scales = quantize(floats.float(), dtype)
    layer.values.copy_(values)
    layer.scales.copy_(scales)
    return layer


def restored(layer: KvLayer) -> Tensor:
    """What a pool of a one-byte type stands for: float32 [NB, 2, Hkv, BS, D]."""
    assert layer.scales is not None
    return layer.values.float() * layer.scales.unsqueeze(-1)
