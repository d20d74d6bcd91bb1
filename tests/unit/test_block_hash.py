"""A block's hash names its tokens and all before them, on every machine and in every run."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.base.block_hash import HASH_BYTES, block_hashes, hash_seed, next_hash

SEED = hash_seed("digest", "salt")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
BLOCK_SIZES = st.sampled_from([1, 8, 16])


def test_known_answers_never_change():
    """Written down once: a change of these values means that old and new workers do not share an index."""
    assert SEED.hex() == "f6aea38c7e3f9027b1f30367cd8b887f"
    assert [h.hex() for h in block_hashes(SEED, range(40), 16)] == [
        "5427e3bd6039a7576105d4699ec450d3",
        "025f446a9bb1ecb4ee19e728b83a9137",
    ]


def test_the_chain_is_keyed_blake2b_over_little_endian_words():
    """Built again from the definition, with struct in place of arrays."""
    parent = hashlib.blake2b(b"digest\x00salt", digest_size=16, person=b"twostroke-kv-1").digest()
    for index, found in enumerate(block_hashes(SEED, list(range(100, 148)), 16)):
        words = struct.pack("<16I", *range(100 + 16 * index, 116 + 16 * index))
        parent = hashlib.blake2b(words, digest_size=16, key=parent).digest()
        assert found == parent


def test_the_hash_does_not_depend_on_the_process():
    script = "from shared.base.block_hash import *; print(block_hashes(hash_seed('digest', 'salt'), range(16), 16)[0].hex())"
    for hash_randomization in ("1", "2"):
        environ = {"PYTHONHASHSEED": hash_randomization}
        shown = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True).stdout
        assert shown.strip() == block_hashes(SEED, range(16), 16)[0].hex()


@given(TOKENS, BLOCK_SIZES)
def test_only_full_blocks_have_a_hash(tokens, block_size):
    hashes = block_hashes(SEED, tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert all(len(h) == HASH_BYTES for h in hashes)


@given(TOKENS, BLOCK_SIZES)
def test_one_at_a_time_gives_the_same_chain(tokens, block_size):
    parent, chain = SEED, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_hash(parent, tokens[start : start + block_size])
        chain.append(parent)
    assert chain == block_hashes(SEED, tokens, block_size)


@given(TOKENS, TOKENS)
def test_a_common_prefix_has_common_hashes_and_nothing_more(left, right):
    num_common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    pairs = list(zip(block_hashes(SEED, left, 8), block_hashes(SEED, right, 8), strict=False))
    assert [a == b for a, b in pairs] == [8 * (i + 1) <= num_common for i in range(len(pairs))]


@pytest.mark.parametrize(("digest", "salt"), [("digest2", "salt"), ("digest", "salt2"), ("digest", ""), ("digests", "alt")])
def test_another_model_or_tenant_shares_no_hash(digest, salt):
    tokens = list(range(64))
    assert not set(block_hashes(SEED, tokens, 16)) & set(block_hashes(hash_seed(digest, salt), tokens, 16))


def test_the_order_of_tokens_matters():
    assert block_hashes(SEED, [1, 2, 3, 4], 4) != block_hashes(SEED, [2, 1, 3, 4], 4)
