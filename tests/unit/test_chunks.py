"""How blocks are cut into chunks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.transports.chunks import cut


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


def test_known_cuts() -> None:
    assert list(cut(5, range(4), 10, 80)) == [(range(0, 2), range(4)), (range(2, 4), range(4)), (range(4, 5), range(4))]
    assert list(cut(2, range(4), 10, 30)) == [
        (range(0, 1), range(0, 3)),
        (range(0, 1), range(3, 4)),
        (range(1, 2), range(0, 3)),
        (range(1, 2), range(3, 4)),
    ]
