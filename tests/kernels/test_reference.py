"""The reference kernels against torch and transformers: the oracle's own oracle."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from shared.base.errors import ConfigError
from shared.kernels import load_kernels
from shared.kernels.interface import AttentionBatch, SamplingBatch
from shared.kernels.kv_layout import KvLayer
from shared.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
BLOCK_SIZE = 8
HEAD_DIM = 16


def make_batch(lens: list[tuple[int, int]], generator: torch.Generator) -> tuple[AttentionBatch, int]:
    """Of sequences (queries, keys) whose blocks are scattered at random over the pool; and the pool's number of blocks."""
    counts = [-(-keys // BLOCK_SIZE) for _, keys in lens]
    ids = torch.randperm(sum(counts) + 3, generator=generator) + 1
    tables = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for table, count, chosen in zip(tables, counts, ids[: sum(counts)].split(counts), strict=True):
        table[:count] = chosen
    positions = [torch.arange(keys - queries, keys) for queries, keys in lens]
    slots = [table[p // BLOCK_SIZE].long() * BLOCK_SIZE + p % BLOCK_SIZE for table, p in zip(tables, positions, strict=True)]
    starts = [0]
    for queries, _ in lens:
        starts.append(starts[-1] + queries)
    batch = AttentionBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([keys for _, keys in lens], dtype=torch.int32),
        block_tables=tables,
        num_single=sum(queries == 1 for queries, _ in lens),
        max_query_len=max(queries for queries, _ in lens),
        max_context_len=max(keys for _, keys in lens),
    )
    return batch, len(ids) + 1


def plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """One sequence, one query and head at a time. q [Q, Hq, D], k, v [keys, Hkv, D]."""
    group, first = q.shape[1] // k.shape[1], len(k) - len(q)
    out = torch.empty_like(q)
    for i in range(len(q)):
        low = max(0, first + i + 1 - window) if window else 0
        for head in range(q.shape[1]):
            keys, values = (x[low : first + i + 1, head // group].double() for x in (k, v))
            scores = keys @ q[i, head].double() * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            out[i, head] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (9, 2.0)])
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 1), (1, 17), (1, 40)],
        [(5, 5), (9, 30)],
        [(1, 8), (1, 25), (3, 3), (16, 33)],
        [(300, 310)],  # more than a slice of queries
    ],
)
def test_attention_equals_a_plain_loop(lens: list[tuple[int, int]], window: int, softcap: float) -> None:
    generator = torch.Generator().manual_seed(len(lens) + window)
    num_heads, num_kv_heads = (2, 1) if lens[0][0] == 300 else (6, 2)
    batch, num_blocks = make_batch(lens, generator)
    kv_layer = torch.full((num_blocks, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM), math.nan)  # whatever is not written must not matter
    q = torch.randn(len(batch.positions), num_heads, HEAD_DIM, generator=generator)
    expected = []
    for s, (queries, num_keys) in enumerate(lens):
        k, v = torch.randn(2, num_keys, num_kv_heads, HEAD_DIM, generator=generator)
        for p in range(num_keys):
            block = batch.block_tables[s, p // BLOCK_SIZE]
            kv_layer[block, 0, :, p % BLOCK_SIZE], kv_layer[block, 1, :, p % BLOCK_SIZE] = k[p], v[p]
        start = int(batch.query_starts[s])
        expected.append(plain_attention(q[start : start + queries], k, v, 0.3, window, softcap).flatten(1))
    out = KERNELS.attention(q, KvLayer(kv_layer), batch, 0.3, window, softcap)
    assert out.is_contiguous()
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_rope_store_rotates_like_transformers_and_writes_only_its_slots() -> None:
    generator = torch.Generator().manual_seed(7)
    batch, num_blocks = make_batch([(1, 20), (6, 11)], generator)
    fused = torch.randn(7, 4 + 2 + 2, HEAD_DIM, generator=generator)
    q, k, v = fused.clone().split((4, 2, 2), dim=1)
    angles = torch.arange(64).float()[:, None] * torch.rand(HEAD_DIM // 2, generator=generator)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    kv_layer = torch.zeros(num_blocks, 2, 2, BLOCK_SIZE, HEAD_DIM)
    KERNELS.rope_store(q, k, v, cos_sin, KvLayer(kv_layer), batch)

    cos, sin = (torch.cat((table, table), -1)[batch.positions] for table in (angles.cos(), angles.sin()))
    expected_q, expected_k = apply_rotary_pos_emb(fused[:, :4], fused[:, 4:6], cos, sin)
    torch.testing.assert_close(q, expected_q)
    by_slot = kv_layer.transpose(2, 3).transpose(1, 2).reshape(-1, 2, 2, HEAD_DIM)  # [NB * BS, K or V, Hkv, D]
    torch.testing.assert_close(by_slot[batch.slots, 0], expected_k)
    torch.testing.assert_close(by_slot[batch.slots, 1], fused[:, 6:])
    by_slot[batch.slots] = 0
    assert not by_slot.any()


def test_a_partial_rotation_leaves_the_other_features() -> None:
    batch, num_blocks = make_batch([(3, 3)], torch.Generator().manual_seed(1))
    q, k, v = torch.randn(3, 3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(8))
    before = q.clone()
    angles = torch.rand(8, 3)
    kv_layer = torch.zeros(num_blocks, 2, 2, BLOCK_SIZE, HEAD_DIM)
    KERNELS.rope_store(q, k, v, torch.stack((angles.cos(), angles.sin()), 1), KvLayer(kv_layer), batch)
    assert torch.equal(q[..., 6:], before[..., 6:])
    assert not torch.equal(q[..., :6], before[..., :6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_torch_and_add_in_place(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, residual = torch.randn(2, 5, 48, generator=generator).to(dtype)
    weight = torch.rand(48, generator=generator).to(dtype)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 0.0, "rtol": 2**-7}
    expected = F.rms_norm(x.double(), (48,), weight.double(), 1e-5).to(dtype)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5), expected, **tolerance)
    total = x + residual
    normed = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, F.rms_norm(total.double(), (48,), weight.double(), 1e-5).to(dtype), **tolerance)


def test_linear_and_silu_mul_equal_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((5, 12), (20, 12), (20,)))
    packed = KERNELS.pack_linear(weight)
    torch.testing.assert_close(KERNELS.linear(x, packed), x @ weight.T)
    gate_up = KERNELS.linear(x, packed, bias)
    torch.testing.assert_close(gate_up, x @ weight.T + bias)
    torch.testing.assert_close(KERNELS.silu_mul(gate_up), F.silu(gate_up[:, :10]) * gate_up[:, 10:])


def test_blocks_are_copied_gathered_and_scattered_whole() -> None:
    kv = torch.randn(7, 2, 2, 3, 4, 5, generator=torch.Generator().manual_seed(4))
    expected = kv.clone()
    ids = torch.tensor([5, 1])
    blocks = KERNELS.gather_blocks(kv, ids)
    assert blocks.is_contiguous()
    assert torch.equal(blocks, expected[[5, 1]])
    KERNELS.copy_blocks(kv, ids, torch.tensor([2, 6]))
    expected[2], expected[6] = expected[5], expected[1]
    assert torch.equal(kv, expected)
    KERNELS.scatter_blocks(kv, torch.tensor([3, 0]), blocks)
    expected[3], expected[0] = expected[5], expected[1]
    assert torch.equal(kv, expected)


# Sampling


def sampling_batch(
    num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
) -> SamplingBatch:
    return SamplingBatch(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        uniforms=(torch.arange(num_rows) + 0.5) / num_rows,  # stratified: counts are exact to one
        all_greedy=temperature == 0.0,
        needs_filter=top_k > 0 or top_p < 1.0 or min_p > 0.0,
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.3, 7, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.8, 12, 0.9, 0.05),
        (1.0, 0, 0.9, 0.15),
        (1.5, 5, 0.8, 0.3),
        (1.0, 500, 1.0, 1.0),
    ],
)
def test_sampled_frequencies_equal_transformers_probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    num_rows = 20_000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 2
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    for used, warper in (
        (min_p > 0.0, lambda: MinPLogitsWarper(min_p)),
        (top_k > 0, lambda: TopKLogitsWarper(top_k)),
        (top_p < 1.0, lambda: TopPLogitsWarper(top_p)),
    ):
        scores = warper()(None, scores) if used else scores
    batch = sampling_batch(num_rows, temperature, top_k, top_p, min_p)
    tokens = KERNELS.sample(logits.repeat(num_rows, 1), batch)
    frequencies = torch.bincount(tokens, minlength=40) / num_rows
    torch.testing.assert_close(frequencies, scores.softmax(-1)[0], atol=2 / num_rows, rtol=0)


def test_the_draw_walks_the_vocabulary_in_order_and_never_takes_an_excluded_token() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    batch = sampling_batch(6)
    batch = SamplingBatch(batch.temperature, batch.top_k, batch.top_p, batch.min_p, uniforms, False, False)
    assert KERNELS.sample(probs.log().repeat(6, 1), batch).tolist() == [1, 1, 3, 3, 4, 4]


def test_greedy_rows_take_the_lowest_of_equal_logits_also_next_to_sampled_rows() -> None:
    logits = torch.zeros(3, 9)
    logits[:, [4, 6]] = 3.0
    assert KERNELS.sample(logits, sampling_batch(3, temperature=0.0)).tolist() == [4, 4, 4]
    mixed = sampling_batch(3)
    mixed.temperature[1] = 0.0
    assert KERNELS.sample(logits, mixed)[1] == 4


def test_of_equal_logits_at_the_border_of_a_filter_the_lower_ids_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).repeat(1000, 1)
    assert set(KERNELS.sample(logits, sampling_batch(1000, top_k=2)).tolist()) == {0, 1}
    assert set(KERNELS.sample(logits, sampling_batch(1000, top_p=0.7)).tolist()) == {0, 1}
    assert set(KERNELS.sample(logits.flip(1), sampling_batch(1000, top_k=2)).tolist()) == {1, 3}


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_p": 0.85, "min_p": 0.15}, {0, 1, 2}),  # of 0.9, not of 1
        ({"top_p": 0.85}, {0, 1, 2, 3}),
        ({"min_p": 0.15}, {0, 1, 2, 3}),
        ({"min_p": 0.15, "top_k": 3}, {0, 1, 2}),
        ({"min_p": 0.3, "top_k": 3}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"top_k": 1}, {0}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_min_p_goes_before_top_k_and_top_p(filters: dict[str, Any], kept: set[int]) -> None:
    logits = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]]).log().repeat(1000, 1)
    assert set(KERNELS.sample(logits, sampling_batch(1000, **filters)).tolist()) == kept


# Choice of a backend


def test_the_body_is_chosen_by_name_and_device() -> None:
    assert load_kernels("reference", torch.device("cpu")).name == "reference"
    with pytest.raises(ConfigError, match="--kernels triton runs on cuda, but the device is cpu"):
        load_kernels("triton", torch.device("cpu"))


def test_without_compiled_kernels_auto_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "shared.kernels.cpu", None)
    with caplog.at_level(logging.WARNING):
        assert load_kernels("auto", torch.device("cpu")).name == "reference"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    with pytest.raises(ConfigError, match="--kernels cpu cannot be loaded"):
        load_kernels("cpu", torch.device("cpu"))
