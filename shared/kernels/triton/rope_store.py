"""Rotary position embedding fused with the store of K and V into the pool: q, k and v are read once and written once.

Grid (T, head tiles): the first tiles rotate query heads in place, the others rotate KV heads and store them with their V.
A one-byte pool (float8_e4m3fn, int8) is quantized on the way: a program has whole heads, and so their largest magnitudes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import LARGEST_STORED, SMALLEST_SCALE, KvLayer
from shared.kernels.triton.launch import Launch, pad, pool_arguments, require

HEADS_PER_TILE = 8
SMALLEST = tl.constexpr(SMALLEST_SCALE)
INFINITY_BITS = tl.constexpr(0x7F800000)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number, ties to even


@triton.jit
def largest_bits(values):
    """[HEADS, n] float32 -> [HEADS] int32: the bits of the largest magnitude. As whole numbers, magnitudes are in order, infinity
    is above all of them and NaN above that."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scales_of(largest, LARGEST_STORED: tl.constexpr):
    """[HEADS] bits of the largest magnitudes -> [HEADS] float32."""
    needed = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST_STORED, tl.float32))
    return tl.where(largest < INFINITY_BITS, tl.maximum(needed, SMALLEST), float("nan"))


@triton.jit
def quantize(values, scales, DTYPE: tl.constexpr):
    """[HEADS, n] float32 to a one-byte type."""
    values = tl.div_rn(values, tl.broadcast_to(scales[:, None], values.shape))
    values = tl.where(values == values, values, 0.0)  # where the scale is NaN
    if tl.int8 == DTYPE:
        values = values + ROUNDER - ROUNDER
    return values.to(DTYPE)


@triton.jit
def rotate_in_place(rows, table_row, pair, present, HALF: tl.constexpr):
    """`rows` [HEADS, 1] pointers to heads. A thread that loads one half loads the other, and stores what it loaded."""
    cos = tl.load(table_row + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(table_row + HALF + pair, mask=pair < HALF, other=0.0)
    x1 = tl.load(rows + pair, mask=present, other=0).to(tl.float32)
    x2 = tl.load(rows + HALF + pair, mask=present, other=0).to(tl.float32)
    tl.store(rows + pair, (x1 * cos - x2 * sin).to(rows.dtype.element_ty), mask=present)
    tl.store(rows + HALF + pair, (x2 * cos + x1 * sin).to(rows.dtype.element_ty), mask=present)


@triton.jit
def rotated(rows, table_row, dims, present, HALF: tl.constexpr):
    """`rows` [HEADS, 1] pointers to heads -> [HEADS, HEAD_PAD] float32; features from 2 * HALF on do not rotate."""
    turns = dims < 2 * HALF
    cos = tl.load(table_row + dims % HALF, mask=turns, other=1.0)
    sin = tl.load(table_row + HALF + dims % HALF, mask=turns, other=0.0)
    x = tl.load(rows + dims, mask=present, other=0).to(tl.float32)
    partner = tl.load(rows + (dims + HALF) % (2 * HALF), mask=present & turns, other=0).to(tl.float32)
    return x * cos + tl.where(dims < HALF, -partner, partner) * sin


@triton.jit
def store_heads(cache, scales, target, scale_target, x, in_head, held, LARGEST_STORED: tl.constexpr):
    """x [HEADS, HEAD_PAD] float32, one token's heads."""
    if scales is not None:
        factors = scales_of(largest_bits(x), LARGEST_STORED)
        tl.store(scales + scale_target, factors, mask=held)
        x = quantize(x, factors, cache.dtype.element_ty)
    tl.store(cache + target, x.to(cache.dtype.element_ty), mask=in_head)


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
    k_scales,  # None, or [NB, Hkv, BS] float32
    v_scales,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_kv_head,
    stride_scale_block,
    stride_scale_head,
    num_heads,
    num_kv_heads,
    HALF: tl.constexpr,  # R / 2
    HALF_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST_STORED: tl.constexpr,  # None: not a one-byte pool
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_row = cos_sin + tl.load(positions + token) * (2 * HALF)
    num_q_tiles = tl.cdiv(num_heads, HEADS)
    if tile < num_q_tiles:
        head, pair = tile * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF_PAD)[None, :]
        rows = q + token * stride_q_token + head[:, None] * stride_q_head
        rotate_in_place(rows, table_row, pair, (head < num_heads)[:, None] & (pair < HALF), HALF)
    else:
        head, dims = (tile - num_q_tiles) * HEADS + tl.arange(0, HEADS), tl.arange(0, HEAD_PAD)[None, :]
        held = head < num_kv_heads
        in_head = held[:, None] & (dims < HEAD_SIZE)
        keys = rotated(k + token * stride_k_token + head[:, None] * stride_k_head, table_row, dims, in_head, HALF)
        values = tl.load(v + token * stride_v_token + head[:, None] * stride_v_head + dims, mask=in_head, other=0).to(tl.float32)

        slot = tl.load(slots + token)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = block * stride_block + offset * HEAD_SIZE + head[:, None] * stride_kv_head + dims
        scale_target = block * stride_scale_block + head * stride_scale_head + offset
        store_heads(k_cache, k_scales, target, scale_target, keys, in_head, held, LARGEST_STORED)
        store_heads(v_cache, v_scales, target, scale_target, values, in_head, held, LARGEST_STORED)


def rope_store_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv_layer: KvLayer,
    batch: AttentionBatch,
) -> Launch:
    """As `Kernels.rope_store`."""
    pool_shape = kv_layer.values.shape
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, rotary_size = k.shape[1], 2 * cos_sin.shape[2]
    require(k.shape == v.shape == (num_tokens, num_kv_heads, head_size), f"k {k.shape} and v {v.shape} do not fit q {q.shape}")
    require((pool_shape[2], pool_shape[4]) == (num_kv_heads, head_size), f"k {k.shape} does not fit pool {pool_shape}")
    require(rotary_size <= head_size, f"rotary size {rotary_size} exceeds head size {head_size}")
    require(q.stride(2) == k.stride(2) == v.stride(2) == 1 and cos_sin.is_contiguous(), "features must be contiguous")
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "cos_sin": cos_sin,
        "positions": batch.positions,
        "slots": batch.slots,
        **pool_arguments(kv_layer),
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "HALF": rotary_size // 2,
        "HALF_PAD": pad(rotary_size // 2),
        "HEAD_SIZE": head_size,
        "HEAD_PAD": pad(head_size),
        "BLOCK_SIZE": pool_shape[3],
        "HEADS": HEADS_PER_TILE,
        "LARGEST_STORED": LARGEST_STORED.get(kv_layer.values.dtype),
    }
    num_tiles = triton.cdiv(num_heads, HEADS_PER_TILE) + triton.cdiv(num_kv_heads, HEADS_PER_TILE)
    return Launch(rope_store_kernel, (num_tokens, num_tiles), arguments, num_warps=4)
