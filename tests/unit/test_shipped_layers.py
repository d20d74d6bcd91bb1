"""What of a prompt is to be sent next: every layer of every block once, in order, whatever is asked for in between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.shipment import ShippedLayers

NUM_BLOCKS, NUM_LAYERS = 6, 4
goals = st.lists(st.tuples(st.integers(0, NUM_BLOCKS), st.integers(0, NUM_LAYERS)), max_size=12)


@given(st.integers(0, NUM_BLOCKS), goals)
def test_every_layer_is_sent_once_in_order_and_none_that_the_receiver_has(num_cached: int, asked: list[tuple[int, int]]) -> None:
    shipped = ShippedLayers(NUM_BLOCKS, NUM_LAYERS, num_cached)
    sent: list[tuple[int, int]] = []
    for num_blocks, num_layers in [*asked, (NUM_BLOCKS, NUM_LAYERS)]:
        for blocks, layers in shipped.missing(num_blocks, num_layers):
            shipped.add(blocks, layers)
            sent += [(block, layer) for block in blocks for layer in layers]
        wanted = {(b, layer) for b in range(num_cached, num_blocks) for layer in range(num_layers)}
        assert wanted <= set(sent)
        assert shipped.missing(num_blocks, num_layers) == []
    assert sorted(sent) == [(block, layer) for block in range(num_cached, NUM_BLOCKS) for layer in range(NUM_LAYERS)]
    for block in range(NUM_BLOCKS):
        layers = [layer for b, layer in sent if b == block]
        assert layers == sorted(layers)


def test_known_pieces() -> None:
    shipped = ShippedLayers(5, 4, 1)
    assert shipped.missing(3, 2) == [(range(1, 3), range(0, 2))]
    shipped.add(range(1, 3), range(0, 2))
    assert shipped.missing(5, 3) == [(range(1, 3), range(2, 3)), (range(3, 5), range(0, 3))]
