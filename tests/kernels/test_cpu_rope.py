"""Rotation and the store into the pool, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.cpu_cases import DTYPES, REFERENCE, Shape, assert_near, cpu_kernels, paged
from tests.support.quantized_kv import ONE_BYTE_TYPES, empty_layer, restored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 128)])
@pytest.mark.parametrize("lens", [[(1, 1)], [(1, 16), (1, 33), (40, 50)]])
def test_rope_store_equals_the_reference(lens: list[tuple[int, int]], head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(6, 2, head_dim, dtype=dtype)
    angles = torch.rand(64, rotary_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    case, expected = paged(lens, shape, seed=2), paged(lens, shape, seed=2)
    cpu_kernels().rope_store(case.q, case.k, case.v, cos_sin, case.kv_layer, case.batch)
    REFERENCE.rope_store(expected.q, expected.k, expected.v, cos_sin, expected.kv_layer, expected.batch)
    assert_near(case.q, expected.q)
    assert torch.equal(case.k, expected.k)  # only q is rotated in place
    assert torch.equal(case.kv.isnan(), expected.kv.isnan())  # nothing else was written, in no other layer either
    assert_near(case.kv.nan_to_num(), expected.kv.nan_to_num())


@pytest.mark.parametrize("kv_dtype", ONE_BYTE_TYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (20, 8)])
def test_a_one_byte_pool_gets_the_bytes_that_the_reference_stores(
    head_dim: int, rotary_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Rotated by a right angle, so that no rounding of the rotation decides what is stored."""
    case = paged([(1, 16), (1, 33), (40, 50)], Shape(6, 2, head_dim, dtype=dtype), seed=3)
    case.k[3], case.v[5] = 0.0, 1e-42
    case.k[7, 1, 2], case.v[8, 0, 0] = math.nan, -math.inf
    cos_sin = torch.stack((torch.zeros(64, rotary_dim // 2), torch.ones(64, rotary_dim // 2)), dim=1)
    layers = [empty_layer(len(case.kv), 2, 16, head_dim, kv_dtype) for _ in range(2)]
    for kernels, layer in zip((REFERENCE, cpu_kernels()), layers, strict=True):
        kernels.rope_store(case.q.clone(), case.k, case.v, cos_sin, layer, case.batch)
    expected, actual = layers
    assert expected.scales is not None
    assert actual.scales is not None
    assert torch.equal(actual.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(actual.scales.view(torch.int32), expected.scales.view(torch.int32))
    assert int(restored(actual).isnan().sum()) == 2 * head_dim
