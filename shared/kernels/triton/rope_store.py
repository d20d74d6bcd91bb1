"""Rotary position embedding fused with the store of K and V into the pool: q, k and v are read once and written once.

Grid (T, head tiles): the first tiles rotate query heads in place, the others rotate KV heads and store them with their V.
A pool of another dtype (float8_e4m3fn, int8) is quantized on the way: stored = value / scale, rounded and clamped.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.interface import AttentionBatch
from shared.kernels.triton.launch import Launch, pad, require

HEADS_PER_TILE = 8
FP8_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)


@triton.jit
def quantize(values, scales, stride_scale, heads, num_kv_heads, DTYPE: tl.constexpr):
    """[HEADS, n] float32 to the pool's dtype."""
    if scales is not None:
        values = values / tl.load(scales + heads * stride_scale, mask=heads < num_kv_heads, other=1.0)[:, None]
    if tl.int8 == DTYPE:
        values = tl.minimum(tl.maximum(tl.floor(values + 0.5), -INT8_MAX), INT8_MAX)
    elif tl.float8e4nv == DTYPE:
        values = tl.minimum(tl.maximum(values, -FP8_MAX), FP8_MAX)
    return values.to(DTYPE)


@triton.jit
def rotated_halves(rows, cos, sin, pair, present, HALF: tl.constexpr):
    """`rows` [HEADS, 1] pointers to heads -> both rotated halves, [HEADS, HALF_PAD] float32."""
    x1 = tl.load(rows + pair, mask=present, other=0).to(tl.float32)
    x2 = tl.load(rows + HALF + pair, mask=present, other=0).to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def rope_store_kernel(
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,
    cos_sin,  # [max_position, 2, R / 2] float32
    positions,
    slots,
    k_cache,  # [NB, Hkv, BS, D]
    v_cache,
    k_scale,  # None, or [Hkv] or [1] float32
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_kv_head,
    stride_scale,
    num_heads,
    num_kv_heads,
    HALF: tl.constexpr,  # R / 2
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)[None, :]
    table_row = cos_sin + tl.load(positions + token) * (2 * HALF) + pair
    cos = tl.load(table_row, mask=pair < HALF, other=0.0)
    sin = tl.load(table_row + HALF, mask=pair < HALF, other=0.0)

    num_q_tiles = tl.cdiv(num_heads, HEADS)
    if tile < num_q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        present = (head < num_heads)[:, None] & (pair < HALF)
        rows = q + token * stride_q_token + head[:, None] * stride_q_head
        y1, y2 = rotated_halves(rows, cos, sin, pair, present, HALF)
        tl.store(rows + pair, y1.to(q.dtype.element_ty), mask=present)
        tl.store(rows + HALF + pair, y2.to(q.dtype.element_ty), mask=present)
    else:
        head = (tile - num_q_tiles) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots + token)
        target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * HEAD_SIZE + head[:, None] * stride_kv_head
        CACHE: tl.constexpr = k_cache.dtype.element_ty

        present = (head < num_kv_heads)[:, None] & (pair < HALF)
        k_rows = k + token * stride_k_token + head[:, None] * stride_k_head
        y1, y2 = rotated_halves(k_rows, cos, sin, pair, present, HALF)
        tl.store(k_cache + target + pair, quantize(y1, k_scale, stride_scale, head, num_kv_heads, CACHE), mask=present)
        tl.store(k_cache + target + HALF + pair, quantize(y2, k_scale, stride_scale, head, num_kv_heads, CACHE), mask=present)

        dims = tl.arange(0, HEAD_PAD)[None, :]
        in_head = (head < num_kv_heads)[:, None] & (dims < HEAD_SIZE)
        if 2 * HALF < HEAD_SIZE:  # features that do not rotate
            still = in_head & (dims >= 2 * HALF)
            rest = tl.load(k_rows + dims, mask=still, other=0).to(tl.float32)
            tl.store(k_cache + target + dims, quantize(rest, k_scale, stride_scale, head, num_kv_heads, CACHE), mask=still)
        v_rows = v + token * stride_v_token + head[:, None] * stride_v_head
        values = tl.load(v_rows + dims, mask=in_head, other=0).to(tl.float32)
        tl.store(v_cache + target + dims, quantize(values, v_scale, stride_scale, head, num_kv_heads, CACHE), mask=in_head)


def rope_store_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv_layer: Tensor,
    batch: AttentionBatch,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Launch:
    """As `Kernels.rope_store`; kv_layer may also be float8_e4m3fn or int8, with k_scale and v_scale float32, [Hkv] or [1]."""
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, rotary_size = k.shape[1], 2 * cos_sin.shape[2]
    require(k.shape == v.shape == (num_tokens, num_kv_heads, head_size), f"k {k.shape} and v {v.shape} do not fit q {q.shape}")
    require(kv_layer.shape[2] == num_kv_heads and kv_layer.shape[4] == head_size, f"k {k.shape} does not fit pool {kv_layer.shape}")
    require(rotary_size <= head_size, f"rotary size {rotary_size} exceeds head size {head_size}")
    require(q.stride(2) == k.stride(2) == v.stride(2) == 1 and cos_sin.is_contiguous(), "features must be contiguous")
    require(kv_layer.dtype != torch.int8 or k_scale is not None, "an int8 pool needs scales")
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "cos_sin": cos_sin,
        "positions": batch.positions,
        "slots": batch.slots,
        "k_cache": kv_layer[:, 0],
        "v_cache": kv_layer[:, 1],
        "k_scale": k_scale,
        "v_scale": v_scale,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "stride_block": kv_layer.stride(0),
        "stride_kv_head": kv_layer.stride(2),
        "stride_scale": 0 if k_scale is None or k_scale.numel() == 1 else 1,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "HALF": rotary_size // 2,
        "HALF_PAD": pad(rotary_size // 2),
        "HEAD_SIZE": head_size,
        "HEAD_PAD": pad(head_size),
        "BLOCK_SIZE": kv_layer.shape[3],
        "HEADS": HEADS_PER_TILE,
    }
    num_tiles = triton.cdiv(num_heads, HEADS_PER_TILE) + triton.cdiv(num_kv_heads, HEADS_PER_TILE)
    return Launch(rope_store_kernel, (num_tokens, num_tiles), arguments, num_warps=4)
