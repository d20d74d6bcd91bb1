"""Counter-based random numbers: the number that samples a position is a pure function of (seed, position).

So any worker continues any request as the first one would have, and no generator's state has to be kept or shipped. The mixing
function is that of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ODD = np.uint64(0xD1342543DE82EF95)
_INT_BITS_OF_FLOAT32 = 24


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """[N] float32 in [0, 1), multiples of 2**-24. Seeds are 64 bits; positions are absolute, from the prompt's first token on.

    The seed is mixed before the position comes in: seeds and positions that are regularly spaced, as those of a request's n
    choices are, must not meet.
    """
    counters = np.array(positions, dtype=np.uint64) * _ODD
    bits = _mix(_mix(np.array(seeds, dtype=np.uint64)) + counters)
    return (bits >> np.uint64(64 - _INT_BITS_OF_FLOAT32)).astype(np.float32) * np.float32(2.0**-_INT_BITS_OF_FLOAT32)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers in which each input bit flips each output bit about half of the time."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
