"""Norms and the gated activation, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cpu_cases import DTYPES, REFERENCE, assert_near, cpu_kernels


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (40, 576), (3, 5, 64), (2, 37), (0, 64)])
def test_rms_norm_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    assert_near(cpu_kernels().rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_rms_norm_takes_heads_out_of_a_fused_projection() -> None:
    heads, weight = random(5, 8, 64, dtype=torch.float32)[:, 2:5], random(64, dtype=torch.float32, seed=1)
    assert_near(cpu_kernels().rms_norm(heads, weight, 1e-5), REFERENCE.rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 70])
def test_add_rms_norm_equals_the_reference_and_adds_in_place(num_rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = random(num_rows, 576, dtype=dtype), random(num_rows, 576, dtype=dtype, seed=1), random(576, dtype=dtype)
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-6)
    assert_near(cpu_kernels().add_rms_norm(x, residual, weight, 1e-6), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1536), (33, 1536), (4, 13)])
def test_silu_mul_equals_the_reference(num_rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(num_rows, 2 * size, dtype=dtype) * 5
    assert_near(cpu_kernels().silu_mul(gate_up), REFERENCE.silu_mul(gate_up), scale=4)


def test_silu_mul_is_exact_enough_far_from_zero() -> None:
    gate_up = torch.tensor([[-200.0, -90.0, -20.0, 0.0, 20.0, 200.0] + [1.0] * 6])
    assert_near(cpu_kernels().silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match="x and weight must fit together"):
        cpu_kernels().rms_norm(torch.zeros(2, 8), torch.zeros(16), 1e-5)
