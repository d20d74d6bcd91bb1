from __future__ import annotations

import numpy as np
import pytest

from shared.base.blocks_of import num_blocks_of


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_the_last_block_may_be_partly_empty(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_of(num_tokens, 16) == num_blocks


def test_counts_of_an_array_are_those_of_its_elements() -> None:
    assert num_blocks_of(np.array([1, 16, 17], np.int64), 16).tolist() == [1, 1, 2]
