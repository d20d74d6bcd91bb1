"""Attention over the paged pool: sequences with one query go to the decode kernel, the others to the prefill kernel."""

from __future__ import annotations

from torch import Tensor

from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import KvLayer
from shared.kernels.triton.attention_decode import decode_launches
from shared.kernels.triton.attention_prefill import prefill_launches
from shared.kernels.triton.launch import Launch, device_traits, require


def attention_launches(
    q: Tensor, kv_layer: KvLayer, batch: AttentionBatch, out: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> list[Launch]:
    """As `Kernels.attention`, into out [T, Hq * D], contiguous."""
    _, num_heads, head_size = q.shape
    _, _, num_kv_heads, block_size, pool_head_size = kv_layer.values.shape
    require(head_size == pool_head_size, f"heads of {head_size} against a pool with heads of {pool_head_size}")
    require(num_heads % num_kv_heads == 0, f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    require(q.stride(2) == 1 and kv_layer.values.stride()[3:] == (head_size, 1), "rows of features must be contiguous")
    require(batch.block_tables.stride(1) == 1, "a row of the block table must be contiguous")
    require(batch.max_context_len <= batch.block_tables.shape[1] * block_size, "the block table is too short for the context")
    traits = device_traits(q.device)
    decode = decode_launches(q, kv_layer, batch, out, traits, scale, window, softcap)
    return decode + prefill_launches(q, kv_layer, batch, out, traits, scale, window, softcap)
