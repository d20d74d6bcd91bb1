"""Rotation and the store into the pool, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cpu_cases import DTYPES, REFERENCE, Shape, assert_near, cpu_kernels, paged


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
