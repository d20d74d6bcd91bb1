"""How keys and values lie in a block, and how one-byte types store them.

A block is plain bytes, and a head's run of it is all that is ever cut out (layers, K and V, heads: the axes before it):

    compute type             [BS, D] values
    int8, float8_e4m3fn      [BS, D] values, then [BS] float32 scales

A one-byte pool has one scale per token and head, for K and V apart: value = stored * scale, with scale = the largest magnitude of
the token's D values / LARGEST_STORED. Nothing is calibrated, and what a token stores depends on that token alone, so blocks that
were computed, cached or handed over hold the same bytes.

Kernels never restore a tile. They multiply what is one number per key anyway: scores by K's scale, probabilities by V's.

One-byte types hold no infinities, and int8 no NaN: a token with a value that is not finite gets the scale NaN, so whatever is
computed with it is NaN, as it would be from a float pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # also of a token that is all zeros: no division by 0, and none by a subnormal


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer of the pool: two strided views of the same memory."""

    values: Tensor  # [NB, 2, Hkv, BS, D], K is 0 and V is 1; of the compute type, int8 or float8_e4m3fn
    scales: Tensor | None = None  # [NB, 2, Hkv, BS] float32; None with the compute type


def typed_views(runs: Tensor, dtype: torch.dtype, block_size: int, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Heads' runs [..., bytes] uint8 as values [..., BS, D] of `dtype` and their scales [..., BS] float32. No copy."""
    num_value_bytes = block_size * head_dim * dtype.itemsize
    values = runs[..., :num_value_bytes].view(dtype).unflatten(-1, (block_size, head_dim))
    scales = runs[..., num_value_bytes:].view(torch.float32) if dtype in LARGEST_STORED else None
    return values, scales
