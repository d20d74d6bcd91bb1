"""The reference backend: plain torch, exact, on any device. Axes as in `shared/kernels/interface.py`.

It is the oracle of the other backends and the fallback where none of them runs. Sequences with one query are one batched gather
and one masked softmax; longer ones are few, and go one by one in slices of queries, so that scores never take more than
[Hq, _QUERY_SLICE, keys]. Unlike the other backends it reads `query_starts` and `context_lens` back to the CPU for the longer
ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.base.blocks_of import num_blocks_of
from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import LARGEST_STORED, SMALLEST_SCALE, KvLayer

_QUERY_SLICE = 256


class ReferenceKernels:
    name = "reference"
    is_capturable = False  # reads lengths back to the CPU, and gathers as many keys as there may be

    def pack_linear(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, packed, bias)

    def embedding(self, token_ids: Tensor, packed: Tensor) -> Tensor:
        return F.embedding(token_ids, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, kv_layer: KvLayer, batch: AttentionBatch) -> None:
        cos, sin = cos_sin[batch.positions].unsqueeze(2).unbind(1)  # [T, 1, R / 2] each
        q.copy_(_rotate(q, cos, sin))
        block_size = kv_layer.values.shape[3]
        blocks, offsets = batch.slots // block_size, batch.slots % block_size
        for which, x in enumerate((_rotate(k, cos, sin), v.float())):
            if kv_layer.scales is not None:
                x, kv_layer.scales[blocks, which, :, offsets] = quantize(x, kv_layer.values.dtype)
            kv_layer.values[blocks, which, :, offsets] = x.to(kv_layer.values.dtype)

    def attention(
        self, q: Tensor, kv_layer: KvLayer, batch: AttentionBatch, scale: float, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n = batch.num_single
        if n:
            table, positions = batch.block_tables[:n], batch.positions[:n, None]
            out[:n] = _attend(q[:n, None], kv_layer, table, positions, batch.max_context_len, scale, window, softcap)[:, 0]
        if n == len(batch.context_lens):
            return out.flatten(1)
        starts, context_lens = batch.query_starts.tolist(), batch.context_lens.tolist()
        for s in range(n, len(context_lens)):
            for first in range(starts[s], starts[s + 1], _QUERY_SLICE):
                rows = slice(first, min(first + _QUERY_SLICE, starts[s + 1]))
                num_keys = context_lens[s] - (starts[s + 1] - rows.stop)  # causal: later keys are seen by later slices only
                table, positions = batch.block_tables[s : s + 1], batch.positions[None, rows]
                out[rows] = _attend(q[None, rows], kv_layer, table, positions, num_keys, scale, window, softcap)[0]
        return out.flatten(1)

    def copy_blocks(self, pool: Tensor, sources: Tensor, targets: Tensor) -> None:
        pool[targets] = pool[sources]

    def gather_blocks(self, pool: Tensor, block_ids: Tensor) -> Tensor:
        return pool[block_ids]

    def scatter_blocks(self, pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        pool[block_ids] = blocks

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        greedy = logits.argmax(-1)
        if batch.all_greedy:
            return greedy
        is_greedy = batch.temperature == 0
        logits = logits / torch.where(is_greedy, 1.0, batch.temperature).unsqueeze(1)
        if batch.needs_filter:
            logits = logits.masked_fill(~_kept(logits, batch), -torch.inf)
        # Double precision, so that each device puts the borders between tokens at the same place, up to a float32's rounding.
        cdf = logits.softmax(-1).double().cumsum(-1)
        drawn = torch.searchsorted(cdf, batch.uniforms.double().unsqueeze(1) * cdf[:, -1:], right=True).squeeze(1)
        return torch.where(is_greedy, greedy, drawn)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] float32 -> (values [..., D] of `dtype`, scales [...]) as a one-byte pool holds them."""
    largest = x.abs().amax(-1)
    scales = (largest / LARGEST_STORED[dtype]).clamp(min=SMALLEST_SCALE).masked_fill_(~largest.isfinite(), torch.nan)
    values = (x / scales.unsqueeze(-1)).nan_to_num_(0.0)
    return (values.round() if dtype is torch.int8 else values).to(dtype), scales


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D], cos and sin [T, 1, R / 2] float32 -> x with its first R features rotated, in float32."""
    rotary = 2 * cos.shape[-1]
    x1, x2 = x[..., :rotary].float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., rotary:].float()), dim=-1)


def _attend(
    q: Tensor, kv_layer: KvLayer, tables: Tensor, positions: Tensor, num_keys: int, scale: float, window: int, softcap: float
) -> Tensor:
    """Q queries of each of B sequences over their first num_keys keys. q [B, Q, Hq, D], tables [B, >= num_keys / BS],
    positions [B, Q] -> [B, Q, Hq, D] float32."""
    num_queries, num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_layer.values.shape[2:4]
    tables = tables[:, : num_blocks_of(num_keys, block_size)]
    blocks = kv_layer.values.permute(1, 2, 0, 3, 4)[:, :, tables]  # a copy, [2, Hkv, B, blocks, BS, D]
    k, v = blocks.flatten(3, 4).float()  # [Hkv, B, keys, D] each
    keys = torch.arange(k.shape[2], device=q.device)
    visible = keys <= positions.unsqueeze(2)  # [B, Q, keys]
    if window:
        visible &= keys > positions.unsqueeze(2) - window
    # Slots that no query sees may hold anything: 0 * NaN would still be NaN.
    unseen = ~visible.any(1)  # [B, keys]
    v.masked_fill_(unseen.unsqueeze(2), 0.0)
    grouped = (q.float() * scale).unflatten(2, (num_kv_heads, -1)).permute(2, 0, 3, 1, 4)  # [Hkv, B, Hq / Hkv, Q, D]
    scores = grouped.flatten(2, 3) @ k.transpose(2, 3)  # [Hkv, B, Hq / Hkv * Q, keys]
    if kv_layer.scales is not None:
        k_scales, v_scales = kv_layer.scales.permute(1, 2, 0, 3)[:, :, tables].flatten(3)  # [Hkv, B, keys] each
        scores *= k_scales.unsqueeze(2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible.repeat(1, num_heads // num_kv_heads, 1)  # [B, Hq / Hkv * Q, keys]
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    if kv_layer.scales is not None:
        weights *= v_scales.masked_fill_(unseen, 0.0).unsqueeze(2)
    mixed: Tensor = (weights @ v).unflatten(2, (-1, num_queries))  # [Hkv, B, Hq / Hkv, Q, D]
    return mixed.permute(1, 3, 0, 2, 4).reshape(-1, num_queries, num_heads, head_dim)


def _kept(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """[N, V]: which tokens min-p, top-k and top-p leave, each taken from what the one before left. Of equal logits the lower id is
    the better one, so that no result depends on how a device's sort breaks ties."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    kept = ordered >= ordered[:, :1] + batch.min_p.unsqueeze(1).log()  # p / p_max >= min_p; log 0 is -inf: off
    kept &= (ranks < batch.top_k.unsqueeze(1)) | (batch.top_k == 0).unsqueeze(1)
    probs = ordered.masked_fill(~kept, -torch.inf).softmax(-1).double()
    before = probs.cumsum(-1) - probs  # mass of the better tokens
    kept &= (before < batch.top_p.unsqueeze(1)) | (batch.top_p == 1.0).unsqueeze(1)
    kept[:, 0] = True  # the best one always stays
    return torch.zeros_like(kept).scatter_(1, ids, kept)
