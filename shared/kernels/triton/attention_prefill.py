"""Prefill attention: sequences with any number of query tokens (chunks, mixed batches), bound by tensor cores.

Grid (query tiles, Hkv). A tile holds `TILE_TOKENS` consecutive tokens of one sequence times the query heads of one KV head.
No table of tiles is built: `sequence_of_tile` finds a tile's sequence by bisecting `query_starts`, with an upper bound of
tiles per sequence that Python integers give. A tile attends first to the keys that all its rows see, without masks, then to
those around the diagonal (or in the window), with masks. Keys of earlier chunks are just keys in earlier blocks.
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
from shared.kernels.triton.launch import DeviceTraits, Launch, dot_dtype, mix_dtype, pad, pad_head, pool_arguments, require


@triton.jit
def first_tile_of(query_starts, seq, num_single, TILE_TOKENS: tl.constexpr):
    """Rounding down and adding one tile per earlier sequence leaves each sequence at least the tiles that it needs."""
    return (tl.load(query_starts + seq) - num_single) // TILE_TOKENS + (seq - num_single)


@triton.jit
def sequence_of_tile(query_starts, tile, num_single, num_seqs, TILE_TOKENS: tl.constexpr):
    """The last sequence whose first tile is not after `tile`."""
    low, high = num_single, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile_of(query_starts, middle, num_single, TILE_TOKENS) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def prefill_kernel(
    q,  # [T, Hq, D]
    out,  # [T, Hq * D]
    k_cache,  # [NB, Hkv, BS, D]
    v_cache,
    block_tables,
    context_lens,
    query_starts,
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
    num_single,
    num_seqs,
    scale,
    window,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
    MIX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see the most keys: start them first
    kv_head = tl.program_id(1)
    seq = sequence_of_tile(query_starts, tile, num_single, num_seqs, TILE_TOKENS)
    first_token = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - first_token
    tile_start = (tile - first_tile_of(query_starts, seq, num_single, TILE_TOKENS)) * TILE_TOKENS
    if tile_start < query_len:
        context_len = tl.load(context_lens + seq)
        row, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PAD)
        token = tile_start + row // GROUP
        head = kv_head * GROUP + row % GROUP
        in_tile = ((token < query_len) & (row < TILE_TOKENS * GROUP))[:, None] & (dims < HEAD_SIZE)[None, :]
        flat_token = (first_token + token).to(tl.int64)
        q_rows = tl.load(
            q + flat_token[:, None] * stride_q_token + head[:, None] * stride_q_head + dims[None, :], mask=in_tile, other=0
        )
        q_rows = q_rows.to(DOT)

        positions = context_len - query_len + token
        first_position = context_len - query_len + tile_start
        last_position = tl.minimum(first_position + TILE_TOKENS, context_len) - 1
        first_key = first_position * 0
        if HAS_WINDOW:
            first_key = tl.maximum(first_position - window + 1, 0)
            full_end = first_key  # the window's edge runs through the tile: all keys take masks
        else:
            full_end = (first_position + 1) // TILE_KEYS * TILE_KEYS

        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        k_head, v_head = k_cache + kv_head * stride_kv_head, v_cache + kv_head * stride_kv_head
        k_factors, v_factors = head_scales(k_scales, kv_head, stride_scale_head), head_scales(v_scales, kv_head, stride_scale_head)
        table = block_tables + seq.to(tl.int64) * stride_table
        # fmt: off
        if not HAS_WINDOW:
            acc, row_max, row_sum = attend_keys(
                acc, row_max, row_sum, q_rows, positions, first_key, full_end, table, k_head, v_head, k_factors, v_factors,
                stride_block, stride_scale_block, scale, window, softcap, HEAD_SIZE, BLOCK_SIZE, TILE_KEYS,
                False, False, HAS_SOFTCAP, DOT, MIX, PRECISION,
            )
        acc, row_max, row_sum = attend_keys(
            acc, row_max, row_sum, q_rows, positions, full_end, last_position + 1, table, k_head, v_head, k_factors, v_factors,
            stride_block, stride_scale_block, scale, window, softcap, HEAD_SIZE, BLOCK_SIZE, TILE_KEYS,
            True, HAS_WINDOW, HAS_SOFTCAP, DOT, MIX, PRECISION,
        )
        # fmt: on
        row_sum = tl.where(row_sum == 0, 1.0, row_sum)  # padding rows beyond the window see nothing
        acc = acc / row_sum[:, None]
        out_rows = out + (flat_token[:, None] * num_heads + head[:, None]) * HEAD_SIZE + dims[None, :]
        tl.store(out_rows, acc.to(out.dtype.element_ty), mask=in_tile)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def prefill_config(head_size: int, dtype: torch.dtype, is_quantized: bool, traits: DeviceTraits) -> PrefillConfig:
    """The launch for a class of heads: the widest tiles that do not spill registers."""
    padded = pad(head_size)
    if dtype == torch.float32:  # three passes over tf32 take as many registers as shared memory
        is_small = padded <= 128 and not is_quantized
        return PrefillConfig(rows=32, tile_keys=32, num_warps=4, num_stages=2) if is_small else PrefillConfig(16, 32, 8, 2)
    if padded <= 64:
        return PrefillConfig(rows=128, tile_keys=64, num_warps=8, num_stages=3)
    if traits.multiplies_from_shared_memory:
        if padded <= 128:
            return PrefillConfig(rows=128, tile_keys=64, num_warps=8, num_stages=3)
        return PrefillConfig(rows=64 if is_quantized else 128, tile_keys=32, num_warps=8, num_stages=2)
    if padded <= 128:
        return PrefillConfig(rows=64 if is_quantized else 128, tile_keys=32, num_warps=8, num_stages=3)
    return PrefillConfig(rows=64, tile_keys=32, num_warps=8, num_stages=2)


def prefill_launches(
    q: Tensor,
    kv_layer: KvLayer,
    batch: AttentionBatch,
    out: Tensor,
    traits: DeviceTraits,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> list[Launch]:
    """Attention of all but the first `batch.num_single` sequences, q [T, Hq, D] to out [T, Hq * D]."""
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = kv_layer.values.shape[2:4]
    num_seqs = batch.context_lens.shape[0]
    if num_seqs == batch.num_single:
        return []
    group = num_heads // num_kv_heads
    config = prefill_config(head_size, q.dtype, kv_layer.scales is not None, traits)
    rows = max(config.rows, pad(group))
    require(rows <= 128, f"at most 128 query heads per KV head, got {group}")
    tile_tokens = rows // group
    num_tiles = (num_tokens - batch.num_single) // tile_tokens + num_seqs - batch.num_single
    arguments = {
        "q": q,
        "out": out,
        **pool_arguments(kv_layer),
        "block_tables": batch.block_tables,
        "context_lens": batch.context_lens,
        "query_starts": batch.query_starts,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_table": batch.block_tables.stride(0),
        "num_heads": num_heads,
        "num_single": batch.num_single,
        "num_seqs": num_seqs,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "GROUP": group,
        "ROWS": rows,
        "HEAD_SIZE": head_size,
        "HEAD_PAD": pad_head(head_size),
        "BLOCK_SIZE": block_size,
        "TILE_KEYS": config.tile_keys,
        "HAS_WINDOW": window > 0,
        "HAS_SOFTCAP": softcap > 0,
        "DOT": dot_dtype(q),
        "MIX": mix_dtype(q, kv_layer),
        "PRECISION": traits.float32_precision,
    }
    return [Launch(prefill_kernel, (num_tiles, num_kv_heads), arguments, config.num_warps, config.num_stages)]
