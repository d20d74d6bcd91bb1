"""How blocks are cut into chunks."""

from __future__ import annotations

from collections import Counter
from math import ceil

import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import BlockPart
from shared.rpc import kv_pb2
from shared.transfer.transports.chunks import blocks_of, checksum_of, chunk_bytes, cut, fill_in, part_of


@given(st.integers(0, 20), st.integers(0, 5), st.integers(1, 9), st.integers(1, 100), st.integers(1, 2000))
def test_chunks_cover_every_layer_of_every_block_once_in_order_and_fit(
    num_blocks: int, first_layer: int, num_layers: int, layer_bytes: int, max_bytes: int
) -> None:
    layers = range(first_layer, first_layer + num_layers)
    chunks = list(cut(num_blocks, layers, layer_bytes, max_bytes))
    cells = [(block, layer) for blocks, run in chunks for block in blocks for layer in run]
    assert Counter(cells) == Counter((block, layer) for block in range(num_blocks) for layer in layers)
    assert cells == sorted(cells)
    assert all(len(blocks) * len(run) * layer_bytes <= max(max_bytes, layer_bytes) for blocks, run in chunks)
    # No fewer would do: as many whole blocks as fit, or of each block as many layers.
    blocks_each, layers_each = max_bytes // (num_layers * layer_bytes), max(1, max_bytes // layer_bytes)
    fewest = ceil(num_blocks / blocks_each) if blocks_each else num_blocks * ceil(num_layers / layers_each)
    assert len(chunks) == fewest


def test_known_cuts() -> None:
    assert list(cut(5, range(4), 10, 80)) == [(range(0, 2), range(4)), (range(2, 4), range(4)), (range(4, 5), range(4))]
    assert list(cut(2, range(4), 10, 30)) == [
        (range(0, 1), range(0, 3)),
        (range(0, 1), range(3, 4)),
        (range(1, 2), range(0, 3)),
        (range(1, 2), range(3, 4)),
    ]


def test_a_limit_that_a_block_meets_exactly_keeps_it_whole() -> None:
    assert list(cut(1, range(4), 10, 40)) == [(range(0, 1), range(4))]
    assert list(cut(1, range(4), 10, 39)) == [(range(0, 1), range(0, 3)), (range(0, 1), range(3, 4))]
    assert list(cut(1, range(1, 3), 10, 1)) == [(range(0, 1), range(1, 2)), (range(0, 1), range(2, 3))]
    assert list(cut(0, range(4), 10, 80)) == []


def test_a_chunk_names_the_blocks_and_the_part_that_were_filled_in() -> None:
    chunk, part = kv_pb2.Chunk(), BlockPart(range(1, 3), range(4, 7))
    fill_in(chunk, range(5, 9), part)
    assert (blocks_of(chunk), part_of(chunk)) == (range(5, 9), part)
    geometry = KvGeometry("w", "float32", num_layers=3, num_kv_heads=8, head_dim=4, block_size=16, kv_dtype="float32")
    assert chunk_bytes(geometry, chunk) == 4 * 2 * 2 * 3 * (16 * 4 * 4)


def test_the_checksum_is_that_of_the_bytes_however_they_are_held() -> None:
    data = bytes(range(256))
    known = xxhash.xxh3_64_intdigest(data)
    assert checksum_of(data) == checksum_of(memoryview(data)) == checksum_of(torch.tensor(list(data), dtype=torch.uint8)) == known
    assert checksum_of(data[:-1]) != known
