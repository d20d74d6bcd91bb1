"""RoPE with store, RMSNorm, SiLU and block copies against the reference."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICE, DTYPES, LAYER, Heads, assert_close, make_batch, randn

from shared.kernels.reference import ReferenceKernels
from shared.kernels.triton import TritonKernels
from shared.kernels.triton.rope_store import rope_store_launch

REFERENCE, TRITON = ReferenceKernels(), TritonKernels()


def fused_projection(heads: Heads, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = heads.num_heads + 2 * heads.num_kv_heads
    fused = randn(num_tokens, total, heads.head_size, seed=1, dtype=dtype)
    q, k, v = fused.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "rotary_size"), [(Heads(9, 3, 64, 16), 64), (Heads(4, 4, 80, 32), 32), (Heads(12, 1, 96, 16), 96)]
)
def test_rope_store_rotates_and_stores_as_the_reference_does(heads: Heads, rotary_size: int, dtype: torch.dtype) -> None:
    batch, num_blocks = make_batch([1, 1, 5], [3, heads.block_size + 1, 40], heads.block_size, seed=2)
    cos_sin = randn(64, 2, rotary_size // 2, seed=3)
    pools, queries = [], []
    for kernels in (REFERENCE, TRITON):
        q, k, v = fused_projection(heads, 7, dtype)
        pool = torch.zeros(num_blocks, 2, 2, heads.num_kv_heads, heads.block_size, heads.head_size, dtype=dtype, device=DEVICE)
        kernels.rope_store(q, k, v, cos_sin, pool[:, LAYER], batch)
        pools.append(pool)
        queries.append(q)
    assert_close(queries[1], queries[0], dtype)
    assert_close(pools[1], pools[0], dtype)
    assert bool((pools[1][:, 1 - LAYER] == 0).all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rope_store_quantizes_by_the_scale_of_each_head(dtype: torch.dtype) -> None:
    # Values that the pool's dtype holds exactly: the interpreter's own conversion to float8 does not carry when it rounds.
    heads = Heads(4, 2, 64, 16)
    batch, num_blocks = make_batch([3], [20], heads.block_size, seed=4)
    scales = torch.tensor([0.25, 0.5], device=DEVICE)
    k, v = ((randn(3, 2, 64, seed=s) * 20).round().clamp(-127, 127).to(dtype) for s in (5, 6))
    no_rotation = torch.stack((torch.ones(64, 32), torch.zeros(64, 32)), dim=1).to(DEVICE)
    pool = torch.zeros(num_blocks, 2, 2, 2, heads.block_size, heads.head_size, device=DEVICE).to(dtype)
    wide_k, wide_v = (x.float() * scales[:, None] for x in (k, v))
    rope_store_launch(randn(3, 4, 64, seed=7), wide_k, wide_v, no_rotation, pool[:, LAYER], batch, scales, scales).run()
    blocks, offsets = batch.slots // heads.block_size, batch.slots % heads.block_size
    assert torch.equal(pool.float()[blocks, LAYER, 0, :, offsets], k.float())
    assert torch.equal(pool.float()[blocks, LAYER, 1, :, offsets], v.float())


def test_rope_store_rounds_and_clamps_to_int8() -> None:
    batch, num_blocks = make_batch([1], [1], 16, seed=8)
    k = torch.tensor([0.3, 0.26, -0.3, 1000.0, -1000.0, 0.0] + [0.0] * 10, device=DEVICE).view(1, 1, 16)
    no_rotation = torch.stack((torch.ones(1, 8), torch.zeros(1, 8)), dim=1).to(DEVICE)
    pool, scale = torch.zeros(num_blocks, 1, 2, 1, 16, 16, dtype=torch.int8, device=DEVICE), torch.tensor([0.5], device=DEVICE)
    rope_store_launch(k.clone(), k, k, no_rotation, pool[:, 0], batch, scale, scale).run()
    assert pool[int(batch.slots[0]) // 16, 0, 0, 0, 0].tolist() == [1, 1, -1, 127, -127, 0] + [0] * 10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 576), (5, 7, 80), (1, 8, 128), (2, 4096), (100,)], ids=str)
def test_rms_norm_matches_over_the_last_axis(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, seed=6, dtype=dtype), randn(shape[-1], seed=7, dtype=dtype)
    assert_close(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), dtype)


def test_rms_norm_takes_a_strided_view_of_heads() -> None:
    x, weight = randn(5, 9, 64, seed=8)[:, 2:5], randn(64, seed=9)
    normed = TRITON.rms_norm(x, weight, 1e-6)
    assert normed.is_contiguous()
    assert_close(normed, REFERENCE.rms_norm(x, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_updates_the_residual_in_place(dtype: torch.dtype) -> None:
    x, weight = randn(3, 576, seed=10, dtype=dtype), randn(576, seed=11, dtype=dtype)
    expected_residual, residual = randn(3, 576, seed=12, dtype=dtype), randn(3, 576, seed=12, dtype=dtype)
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(TRITON.add_rms_norm(x, residual, weight, 1e-5), expected, dtype)
    assert_close(residual, expected_residual, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_features", [40, 1536])
def test_silu_mul_matches(num_features: int, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * num_features, seed=13, dtype=dtype)
    assert_close(TRITON.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_block_copies_move_whole_blocks_and_nothing_else(dtype: torch.dtype) -> None:
    kv = (randn(9, 3, 2, 2, 16, 80, seed=14) * 40).to(dtype)
    ids = torch.tensor([7, 2, 5], device=DEVICE)
    gathered = TRITON.gather_blocks(kv, ids)
    assert torch.equal(gathered, kv[ids])

    expected, actual = kv.clone(), kv.clone()
    expected[[1, 8, 3]] = gathered
    TRITON.scatter_blocks(actual, torch.tensor([1, 8, 3], device=DEVICE), gathered)
    assert torch.equal(actual, expected)

    expected[[4, 6]] = expected[[2, 7]]
    pairs = torch.tensor([[2, 4], [7, 6]], device=DEVICE)  # the ids are strided views
    TRITON.copy_blocks(actual, pairs[:, 0], pairs[:, 1])
    assert torch.equal(actual, expected)


def test_copying_no_blocks_does_nothing() -> None:
    kv = randn(3, 1, 2, 1, 16, 64, seed=15)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert TRITON.gather_blocks(kv, nothing).shape == (0, 1, 2, 1, 16, 64)
    TRITON.copy_blocks(kv, nothing, nothing)
