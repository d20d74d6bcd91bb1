"""The inner loop that decode and prefill share: one tile of query rows against a run of paged keys, with online softmax.

A program holds `ROWS` query rows of one KV head: the heads of its group side by side, for one token (decode) or several
(prefill), so that K and V are read once for all query heads that share them. It walks the keys `TILE_KEYS` at a time; a tile
of keys may span several blocks or part of one, since each key finds its block through the table.

With a one-byte pool a key's scale multiplies its score, and a value's scale its weight: one number per key instead of D.

    acc [ROWS, D]   sum over keys of 2^(score - row_max) V, not yet divided by row_sum
    row_max [ROWS]  the largest score so far, in units of log2 e (exp2 is the hardware's exponential)
    row_sum [ROWS]  sum over keys of 2^(score - row_max)

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., "FlashAttention" (2022).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_cache(cache, offsets, dims, present, HEAD_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """[TILE_KEYS, D] rows of K or V. Each mask is left out where it would be all true: unmasked loads are the widest."""
    pointers = cache + offsets[:, None] + dims[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=present[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0)
    elif dims.shape[0] != HEAD_SIZE:
        rows = tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def load_scales(scales, offsets, present, MASKED: tl.constexpr):
    """[TILE_KEYS] float32. Absent keys get 0, for what lies there may be NaN."""
    if MASKED:
        factors = tl.load(scales + offsets, mask=present, other=0.0)
    else:
        factors = tl.load(scales + offsets)
    return factors


@triton.jit
def attend_keys(
    acc,
    row_max,
    row_sum,
    q,  # [ROWS, D] in DOT's type
    row_positions,  # [ROWS] absolute position of each row's token
    first_key,
    end_key,  # exclusive
    block_table,  # this sequence's row
    k_cache,  # at this KV head
    v_cache,
    k_scales,  # likewise, float32; None: the pool has the type of the heads
    v_scales,
    stride_block,
    stride_scale_block,
    scale,
    window,
    softcap,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # False promises: every row sees every key, and the run is whole tiles
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,  # type of products with keys
    MIX: tl.constexpr,  # type of products with values
    PRECISION: tl.constexpr,  # of float32 products: "ieee" on plain cores, "tf32x3" on tensor cores in three passes
):
    """Folds keys first_key .. end_key - 1 into (acc, row_max, row_sum)."""
    dims = tl.arange(0, acc.shape[1])
    for start in range(first_key, end_key, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        present = keys < end_key
        if MASKED:
            blocks = tl.load(block_table + keys // BLOCK_SIZE, mask=present, other=0)
        else:
            blocks = tl.load(block_table + keys // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * stride_block + (keys % BLOCK_SIZE) * HEAD_SIZE
        scale_offsets = blocks.to(tl.int64) * stride_scale_block + keys % BLOCK_SIZE

        k = load_cache(k_cache, offsets, dims, present, HEAD_SIZE, MASKED).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if k_scales is not None:
            scores = scores * load_scales(k_scales, scale_offsets, present, MASKED)[None, :]
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # = softcap * tanh(scores / softcap)
        scores = scores * LOG2_E
        if MASKED:
            visible = (keys[None, :] <= row_positions[:, None]) & present[None, :]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        if MASKED:  # a row may have seen no key yet; -inf minus -inf must not become NaN
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        if v_scales is not None:
            weights = weights * load_scales(v_scales, scale_offsets, present, MASKED)[None, :]
        v = load_cache(v_cache, offsets, dims, present, HEAD_SIZE, MASKED).to(MIX)
        acc = acc * decay[:, None] + tl.dot(weights.to(MIX), v, input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit
def head_scales(scales, kv_head, stride_scale_head):
    """The scales of one KV head, if there are any."""
    if scales is not None:
        scales += kv_head * stride_scale_head
    return scales
