"""Decode attention: one query token per sequence, bound by reading K and V once.

1. `decode_kernel`, grid (S, Hkv, splits): each program takes one KV head of one sequence and an equal share of its visible
   keys. Few sequences with long contexts would leave most of the device idle, hence the split over keys.
2. `reduce_kernel`, grid (S, Hq), only with more than one split: merges the shares' partial results by their weights.

The number of splits depends on Python integers alone (batch size, longest context), so the launch can be captured in a CUDA
graph; the shares follow each sequence's true length, read on the device. A captured launch is made for the longest context that may
be: a short one is cut into shares of one tile, and programs that are left without keys end at once.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.interface import AttentionBatch
from shared.kernels.kv_layout import KvLayer
from shared.kernels.triton.attention_tile import attend_keys, head_scales
from shared.kernels.triton.launch import (
    MIN_DOT_SIZE,
    DeviceTraits,
    Launch,
    dot_dtype,
    mix_dtype,
    pad,
    pad_head,
    pool_arguments,
    require,
)

MAX_GROUP = 128
MAX_SPLITS = 64
MIN_KEYS_PER_SPLIT = 256  # below this, merging costs more than the idle device
PROGRAMS_PER_MULTIPROCESSOR = 2


@triton.jit
def decode_kernel(
    q,  # [S, Hq, D]
    out,  # [S, Hq * D]; with SPLIT float32 [S, Hq, num_splits, D]
    log_sums,  # with SPLIT: [S, Hq, num_splits] float32, log2 of the sum of each share's weights
    k_cache,  # [NB, Hkv, BS, D]
    v_cache,
    block_tables,
    context_lens,
    k_scales,  # None, or [NB, Hkv, BS] float32
    v_scales,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_kv_head,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    num_heads,
    num_splits,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
    MIX: tl.constexpr,
):
    seq, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    first_key = context_len * 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len - window, 0)
    # Whole tiles per share, so that only the sequence's last tile needs masks.
    keys_per_split = tl.cdiv(tl.cdiv(context_len - first_key, num_splits), TILE_KEYS) * TILE_KEYS
    first_key += split * keys_per_split
    end_key = tl.minimum(first_key + keys_per_split, context_len)

    row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PAD)
    head = kv_head * GROUP + row
    in_head = (row < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    result = (seq * num_heads + head) * num_splits + split
    if first_key < end_key:
        q_rows = tl.load(q + seq * stride_q_token + head[:, None] * stride_q_head + dims[None, :], mask=in_head, other=0)
        q_rows = q_rows.to(DOT)
        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        position = tl.zeros([ROWS], tl.int32) + (context_len - 1)
        k_head, v_head = k_cache + kv_head * stride_kv_head, v_cache + kv_head * stride_kv_head
        k_factors, v_factors = head_scales(k_scales, kv_head, stride_scale_head), head_scales(v_scales, kv_head, stride_scale_head)
        table = block_tables + seq * stride_table
        full_end = first_key + (end_key - first_key) // TILE_KEYS * TILE_KEYS
        # fmt: off
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q_rows, position, first_key, full_end, table, k_head, v_head, k_factors, v_factors,
            stride_block, stride_scale_block, scale, window, softcap, HEAD_SIZE, BLOCK_SIZE, TILE_KEYS,
            False, False, HAS_SOFTCAP, DOT, MIX, "ieee",
        )
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q_rows, position, full_end, end_key, table, k_head, v_head, k_factors, v_factors,
            stride_block, stride_scale_block, scale, window, softcap, HEAD_SIZE, BLOCK_SIZE, TILE_KEYS,
            True, False, HAS_SOFTCAP, DOT, MIX, "ieee",
        )
        # fmt: on
        acc = acc / row_sum[:, None]
        tl.store(out + result[:, None] * HEAD_SIZE + dims[None, :], acc.to(out.dtype.element_ty), mask=in_head)
        if SPLIT:
            tl.store(log_sums + result, row_max + tl.log2(row_sum), mask=row < GROUP)
    elif SPLIT:
        tl.store(log_sums + result, tl.full([ROWS], float("-inf"), tl.float32), mask=row < GROUP)
    else:  # a padding row of a captured batch may have no keys at all
        zeros = tl.zeros([ROWS, HEAD_PAD], out.dtype.element_ty)
        tl.store(out + result[:, None] * HEAD_SIZE + dims[None, :], zeros, mask=in_head)


@triton.jit
def reduce_kernel(
    out,  # [S, Hq * D]
    partial_out,  # [S, Hq, num_splits, D] float32
    log_sums,  # [S, Hq, num_splits] float32
    num_heads,
    num_splits,
    SPLITS_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split, dims = tl.arange(0, SPLITS_PAD), tl.arange(0, HEAD_PAD)
    log_sum = tl.load(log_sums + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    top = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(top == float("-inf"), 0.0, top))
    # Shares without keys wrote no result: what lies there may be NaN and must not be read.
    pointers = partial_out + (row * num_splits + split)[:, None] * HEAD_SIZE + dims[None, :]
    partial = tl.load(pointers, mask=(weight > 0)[:, None] & (dims < HEAD_SIZE)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * HEAD_SIZE + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    tile_keys: int
    num_warps: int
    num_stages: int


def decode_config(head_size: int, dtype: torch.dtype, group: int, is_quantized: bool) -> DecodeConfig:
    """The launch for a class of heads. Tiles shrink as heads grow, so that two programs fit a multiprocessor, and where
    converting keys and values takes registers."""
    if dtype == torch.float32:
        return DecodeConfig(tile_keys=16, num_warps=4, num_stages=1 if is_quantized else 2)
    is_wide = pad(head_size) > 128
    many_warps = group > MIN_DOT_SIZE or (is_quantized and not is_wide)
    return DecodeConfig(tile_keys=32 if is_wide or is_quantized else 64, num_warps=8 if many_warps else 4, num_stages=3)


def choose_num_splits(batch_size: int, num_kv_heads: int, max_keys: int, multiprocessors: int) -> int:
    """Enough shares to fill the device, none shorter than what pays for its merging."""
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, batch_size * num_kv_heads)
    return int(max(1, min(wanted, max_keys // MIN_KEYS_PER_SPLIT, MAX_SPLITS)))


def decode_launches(
    q: Tensor,
    kv_layer: KvLayer,
    batch: AttentionBatch,
    out: Tensor,
    traits: DeviceTraits,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = None,
) -> list[Launch]:
    """Attention of the first `batch.num_single` sequences, q [>= num_single, Hq, D] to out [>= num_single, Hq * D].

    `num_splits` is chosen unless given.
    """
    num_seqs, num_heads, head_size = batch.num_single, q.shape[1], q.shape[2]
    num_kv_heads, block_size = kv_layer.values.shape[2:4]
    group = num_heads // num_kv_heads
    require(group <= MAX_GROUP, f"at most {MAX_GROUP} query heads per KV head, got {group}")
    if num_seqs == 0:
        return []
    config = decode_config(head_size, q.dtype, group, kv_layer.scales is not None)
    if num_splits is None:
        max_keys = min(batch.max_context_len, window) if window else batch.max_context_len
        num_splits = choose_num_splits(num_seqs, num_kv_heads, max_keys, traits.num_multiprocessors)
    is_split = num_splits > 1
    partial_out = q.new_empty((num_seqs, num_heads, num_splits, head_size), dtype=torch.float32) if is_split else out
    log_sums = q.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32) if is_split else None
    decode = Launch(
        decode_kernel,
        (num_seqs, num_kv_heads, num_splits),
        {
            "q": q,
            "out": partial_out,
            "log_sums": log_sums,
            **pool_arguments(kv_layer),
            "block_tables": batch.block_tables,
            "context_lens": batch.context_lens,
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_table": batch.block_tables.stride(0),
            "num_heads": num_heads,
            "num_splits": num_splits,
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "GROUP": group,
            "ROWS": max(MIN_DOT_SIZE, pad(group)),
            "HEAD_SIZE": head_size,
            "HEAD_PAD": pad_head(head_size),
            "BLOCK_SIZE": block_size,
            "TILE_KEYS": config.tile_keys,
            "SPLIT": is_split,
            "HAS_WINDOW": window > 0,
            "HAS_SOFTCAP": softcap > 0,
            "DOT": dot_dtype(q),
            "MIX": mix_dtype(q, kv_layer),
        },
        config.num_warps,
        config.num_stages,
    )
    return [decode, _reduce_launch(out, partial_out, log_sums)] if log_sums is not None else [decode]


def _reduce_launch(out: Tensor, partial_out: Tensor, log_sums: Tensor) -> Launch:
    num_seqs, num_heads, num_splits, head_size = partial_out.shape
    arguments = {
        "out": out,
        "partial_out": partial_out,
        "log_sums": log_sums,
        "num_heads": num_heads,
        "num_splits": num_splits,
        "SPLITS_PAD": pad(num_splits),
        "HEAD_SIZE": head_size,
        "HEAD_PAD": pad_head(head_size),
    }
    return Launch(reduce_kernel, (num_seqs, num_heads), arguments, num_warps=4 if pad(head_size) <= 128 else 8)
