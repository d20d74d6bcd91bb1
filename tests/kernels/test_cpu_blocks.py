"""Whole blocks moved within, out of and into the pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cpu_cases import DTYPES, cpu_kernels


def pool(dtype: torch.dtype) -> Tensor:
    return torch.randn(12, 3, 2, 2, 16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_gathered_and_scattered_whole(dtype: torch.dtype) -> None:
    kv = pool(dtype)
    expected = kv.clone()
    expected[[4, 9]] = expected[[1, 7]]
    cpu_kernels().copy_blocks(kv, torch.tensor([1, 7]), torch.tensor([4, 9]))
    assert torch.equal(kv, expected)
    ids = torch.tensor([9, 2, 5])
    blocks = cpu_kernels().gather_blocks(kv, ids)
    assert torch.equal(blocks, kv[ids])
    assert blocks.is_contiguous()
    expected[[3, 11, 0]] = blocks
    cpu_kernels().scatter_blocks(kv, torch.tensor([3, 11, 0]), blocks)
    assert torch.equal(kv, expected)


def test_no_blocks_change_nothing() -> None:
    kv, none = pool(torch.float32), torch.empty(0, dtype=torch.int64)
    cpu_kernels().copy_blocks(kv, none, none)
    cpu_kernels().scatter_blocks(kv, none, cpu_kernels().gather_blocks(kv, none))
    assert torch.equal(kv, pool(torch.float32))


@pytest.mark.parametrize("block_id", [-1, 12])
def test_a_block_outside_the_pool_is_refused(block_id: int) -> None:
    with pytest.raises(RuntimeError, match=f"block id {block_id} is not in the pool of 12"):
        cpu_kernels().gather_blocks(pool(torch.float32), torch.tensor([block_id]))


def test_blocks_of_another_shape_are_refused() -> None:
    with pytest.raises(RuntimeError, match="shape and type"):
        cpu_kernels().scatter_blocks(pool(torch.float32), torch.tensor([1]), torch.zeros(1, 3, 2, 2, 16, 4))
