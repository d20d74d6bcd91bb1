"""RoPE with store, RMSNorm, SiLU and block copies against the reference."""

from __future__ import annotations

import pytest
import torch
from problems import DEVICE, DTYPES, LAYER, Heads, assert_close, make_batch, randn

from shared.kernels.kv_layout import LARGEST_STORED, KvLayer
from shared.kernels.reference import ReferenceKernels
from shared.kernels.triton import TritonKernels
from tests.support.quantized_kv import ONE_BYTE_TYPES, empty_layer, restored

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
        kernels.rope_store(q, k, v, cos_sin, KvLayer(pool[:, LAYER]), batch)
        pools.append(pool)
        queries.append(q)
    assert_close(queries[1], queries[0], dtype)
    assert_close(pools[1], pools[0], dtype)
    assert bool((pools[1][:, 1 - LAYER] == 0).all())


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "rotary_size"), [(Heads(4, 2, 64, 16), 64), (Heads(4, 3, 80, 8), 32)], ids=str)
def test_rope_store_quantizes_each_head_of_each_token_as_the_reference_does(
    heads: Heads, rotary_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Rotated by a right angle, so that no rounding of the rotation decides what is stored. Codes are whole multiples of powers of
    two, for the interpreter's own conversion to float8 does not carry when it rounds."""
    batch, num_blocks = make_batch([1, 5], [3, 40], heads.block_size, seed=4)
    q, k, v = fused_projection(heads, 6, torch.float32)
    steps = (2.0 ** torch.arange(6 * heads.num_kv_heads).remainder(7)).view(6, -1, 1).to(DEVICE) / 64
    k, v = (((x * 4).round().clamp(-13, 13) * steps) for x in (k, v))
    k[..., 0], v[..., 1] = LARGEST_STORED[kv_dtype] * steps[..., 0], -LARGEST_STORED[kv_dtype] * steps[..., 0]
    k[2], k[4, 1, 7], v[3, 0, 5] = 0.0, torch.nan, torch.inf
    q, k, v = (x.to(dtype) for x in (q, k, v))
    halves = (64, rotary_size // 2)
    cos_sin = torch.stack((torch.zeros(halves), torch.ones(halves)), dim=1).to(DEVICE)
    layers = []
    for kernels in (REFERENCE, TRITON):
        layer = empty_layer(num_blocks, heads.num_kv_heads, heads.block_size, heads.head_size, kv_dtype, DEVICE.type)
        kernels.rope_store(q.clone(), k, v, cos_sin, layer, batch)
        layers.append(layer)
    expected, actual = layers
    assert torch.equal(actual.values.float(), expected.values.float())
    torch.testing.assert_close(actual.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert int(restored(actual).isnan().sum()) == 2 * heads.head_size


def test_rope_store_rounds_to_the_nearest_step_of_int8_ties_to_even() -> None:
    batch, num_blocks = make_batch([1], [1], 16, seed=8)
    k = torch.tensor([0.3, 0.26, -0.3, 0.25, 0.75, -0.25, 63.5, -0.75] + [0.0] * 8, device=DEVICE).view(1, 1, 16)
    no_rotation = torch.stack((torch.ones(1, 8), torch.zeros(1, 8)), dim=1).to(DEVICE)
    layer = empty_layer(num_blocks, 1, 16, 16, torch.int8, DEVICE.type)
    TRITON.rope_store(k.clone(), k, k, no_rotation, layer, batch)
    block = int(batch.slots[0]) // 16
    assert layer.values[block, 0, 0, 0].tolist() == [1, 1, -1, 0, 2, 0, 127, -2] + [0] * 8
    assert layer.scales is not None
    assert layer.scales[block, :, 0, 0].tolist() == [0.5, 0.5]


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
