"""How many blocks hold so many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Count = TypeVar("_Count", int, "NDArray[np.int64]")


def num_blocks_of(num_tokens: _Count, block_size: int) -> _Count:
    """Blocks that hold `num_tokens`, elementwise for an array; the last one may be partly empty."""
    return -(-num_tokens // block_size)
