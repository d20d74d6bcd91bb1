"""Linear layers on the CPU, against float64 products."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.cpu.kernels import Panels
from tests.kernels.cpu_cases import DTYPES, cpu_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 64, 65, 100])
@pytest.mark.parametrize(("size", "num_outputs"), [(576, 960), (64, 7), (45, 1030), (1100, 50)])
def test_linear_equals_the_product_in_double_precision(size: int, num_outputs: int, num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(*s, generator=generator).to(dtype) for s in ((num_rows, size), (num_outputs, size), (num_outputs,))
    )
    packed = cpu_kernels().pack_linear(weight)
    plain = x.double() @ weight.double().T
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2**-7}
    torch.testing.assert_close(cpu_kernels().linear(x, packed), plain.to(dtype), **tolerance)
    torch.testing.assert_close(cpu_kernels().linear(x, packed, bias), (plain + bias.double()).to(dtype), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_the_same_bits_whatever_the_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((200, 1100), (50, 1100)))
    packed = cpu_kernels().pack_linear(weight)
    most_rows = 200 if isinstance(packed, Panels) else 8  # where bfloat16 is native, torch multiplies more rows
    together = cpu_kernels().linear(x[:most_rows], packed)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 13, 31, 63, 64, 65, 130, 199):
        count = min(num_rows, most_rows)
        assert torch.equal(cpu_kernels().linear(x[:count], packed), together[:count])


def test_widened_bfloat16_weights_are_kept_narrow_and_give_the_same_bits_as_float32_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((9, 300), (70, 300), (70,)))
    weight = weight.bfloat16().float()
    packed = cpu_kernels().pack_linear(weight)
    almost = weight.clone()
    almost[69, 299] += 1e-6  # the last output alone needs float32
    packed_wide = cpu_kernels().pack_linear(almost)
    assert isinstance(packed, Panels)
    assert isinstance(packed_wide, Panels)
    assert packed.values.dtype is torch.bfloat16
    assert packed_wide.values.dtype is torch.float32
    narrow, wide = cpu_kernels().linear(x, packed, bias), cpu_kernels().linear(x, packed_wide, bias)
    assert narrow.dtype is torch.float32
    assert torch.equal(narrow[:, :69], wide[:, :69])
    assert cpu_kernels().embedding(torch.tensor([3]), packed).dtype is torch.float32


def test_no_rows_give_no_rows() -> None:
    packed = cpu_kernels().pack_linear(torch.zeros(4, 16))
    assert cpu_kernels().linear(torch.zeros(0, 16), packed).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_reads_the_rows_that_were_packed(dtype: torch.dtype) -> None:
    weight = torch.randn(101, 45, generator=torch.Generator().manual_seed(0)).to(dtype)
    token_ids = torch.tensor([0, 100, 17, 17, 8, 15, 16])
    assert torch.equal(cpu_kernels().embedding(token_ids, cpu_kernels().pack_linear(weight)), weight[token_ids])
