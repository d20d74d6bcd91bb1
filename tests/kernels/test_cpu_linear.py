"""Linear layers on the CPU, against float64 products."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.cpu import CpuKernels
from shared.kernels.cpu.kernels import Bf16Layout, PairPanels, Panels
from tests.kernels.cpu_cases import cpu_kernels

# Every way to multiply, also those that another CPU would choose: an instruction that this one lacks is computed in plain lanes.
WAYS = [(torch.float32, None), *((torch.bfloat16, layout) for layout in Bf16Layout)]


def kernels_for(layout: Bf16Layout | None) -> CpuKernels:
    return CpuKernels(layout)


@pytest.mark.parametrize(("dtype", "layout"), WAYS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 65, 100])
@pytest.mark.parametrize(("size", "num_outputs"), [(576, 960), (64, 7), (45, 1030), (1100, 50)])
def test_linear_equals_the_product_in_double_precision(
    size: int, num_outputs: int, num_rows: int, dtype: torch.dtype, layout: Bf16Layout | None
) -> None:
    kernels = kernels_for(layout)
    generator = torch.Generator().manual_seed(num_rows)
    x, weight, bias = (
        torch.randn(*s, generator=generator).to(dtype) for s in ((num_rows, size), (num_outputs, size), (num_outputs,))
    )
    packed = kernels.pack_linear(weight)
    plain = x.double() @ weight.double().T
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2**-7}
    torch.testing.assert_close(kernels.linear(x, packed), plain.to(dtype), **tolerance)
    torch.testing.assert_close(kernels.linear(x, packed, bias), (plain + bias.double()).to(dtype), **tolerance)


@pytest.mark.parametrize(("dtype", "layout"), WAYS)
def test_a_row_gets_the_same_bits_whatever_the_others(dtype: torch.dtype, layout: Bf16Layout | None) -> None:
    kernels = kernels_for(layout)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((200, 1100), (50, 1100)))
    packed = kernels.pack_linear(weight)
    most_rows = 200 if isinstance(packed, Panels | PairPanels) else 8  # torch multiplies more rows in another order
    together = kernels.linear(x[:most_rows], packed)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 13, 31, 63, 64, 65, 130, 199):
        count = min(num_rows, most_rows)
        assert torch.equal(kernels.linear(x[:count], packed), together[:count])


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


def test_products_of_pairs_have_the_same_bits_by_instruction_and_in_plain_lanes_with_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).bfloat16() for s in ((37, 300), (500, 300)))
    kernels = kernels_for(Bf16Layout.PAIRS)
    packed = kernels.pack_linear(weight)
    expected = _pairs_in_order(x, weight)
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(kernels.linear(x, packed), expected.bfloat16())
    finally:
        torch.set_num_threads(num_threads)


def _pairs_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Float32 sums of pairs of inputs in order, the odd product of a pair first; each addition rounds once."""
    sums = torch.zeros(len(x), len(weight))
    for k in range(0, x.shape[1], 2):
        for i in (k + 1, k):
            product = x[:, i, None].double() * weight[None, :, i].double()  # exact
            sums = (sums.double() + product).float()
    return sums


@pytest.mark.parametrize(("dtype", "layout"), WAYS)
def test_no_rows_give_no_rows(dtype: torch.dtype, layout: Bf16Layout | None) -> None:
    kernels = kernels_for(layout)
    packed = kernels.pack_linear(torch.zeros(4, 16, dtype=dtype))
    assert kernels.linear(torch.zeros(0, 16, dtype=dtype), packed).shape == (0, 4)


@pytest.mark.parametrize(("dtype", "layout"), WAYS)
def test_an_embedding_reads_the_rows_that_were_packed(dtype: torch.dtype, layout: Bf16Layout | None) -> None:
    kernels = kernels_for(layout)
    weight = torch.randn(101, 45, generator=torch.Generator().manual_seed(0)).to(dtype)
    token_ids = torch.tensor([0, 100, 17, 17, 8, 15, 16])
    assert torch.equal(kernels.embedding(token_ids, kernels.pack_linear(weight)), weight[token_ids])
