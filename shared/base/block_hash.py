"""The identity of a block: a chained keyed hash, the same on every machine and in every run.

    h[-1] = seed                       everything that changes KV values: model digest, tenant salt
    h[i]  = BLAKE2b-128(key = h[i-1], ids of block i as little-endian uint32)

A hash therefore names a block's tokens and the whole prefix before them. Only full blocks have one.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def hash_seed(digest: str, cache_salt: str = "") -> bytes:
    """The root of the chain. `digest` is the worker digest (`shared/base/worker_info.py`); a salt separates tenants."""
    return blake2b(f"{digest}\0{cache_salt}".encode(), digest_size=HASH_BYTES, person=b"twostroke-kv-1").digest()


def next_hash(parent: bytes, block: Sequence[int]) -> bytes:
    return blake2b(_pack(block), digest_size=HASH_BYTES, key=parent).digest()


def block_hashes(seed: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, in order."""
    packed = _pack(token_ids)
    step, parent, hashes = 4 * block_size, seed, []
    for start in range(0, len(token_ids) // block_size * step, step):
        parent = blake2b(packed[start : start + step], digest_size=HASH_BYTES, key=parent).digest()
        hashes.append(parent)
    return hashes


def _pack(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
