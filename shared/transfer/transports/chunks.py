"""How blocks are cut into chunks, and a chunk's ranges, size and checksum, which are the same at both ends."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash
from torch import Tensor

from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import BlockPart
from shared.rpc import kv_pb2
from shared.transfer.transports.interface import Payload


def cut(num_blocks: int, layers: range, layer_bytes: int, max_chunk_bytes: int) -> Iterator[tuple[range, range]]:
    """The (blocks, layers) of each chunk, in order: as many whole blocks as fit, or, of blocks too large, as many layers.

    `layer_bytes` is the size of one layer of one block. One layer is the least that is sent, whatever its size.
    """
    block_bytes = len(layers) * layer_bytes
    if block_bytes <= max_chunk_bytes:
        for blocks in _runs(range(num_blocks), max_chunk_bytes // block_bytes):
            yield blocks, layers
        return
    for block in range(num_blocks):
        for run in _runs(layers, max(1, max_chunk_bytes // layer_bytes)):
            yield range(block, block + 1), run


def _runs(whole: range, length: int) -> Iterator[range]:
    return (whole[start : start + length] for start in range(0, len(whole), length))


def chunk_bytes(geometry: KvGeometry, chunk: kv_pb2.Chunk) -> int:
    """`geometry` is the whole model's."""
    return chunk.num_blocks * chunk.num_layers * 2 * chunk.num_heads * geometry.head_bytes


def blocks_of(chunk: kv_pb2.Chunk) -> range:
    """Which of the prompt's blocks."""
    return range(chunk.first_block, chunk.first_block + chunk.num_blocks)


def part_of(chunk: kv_pb2.Chunk) -> BlockPart:
    """Which layers and which of the model's KV heads of each of these blocks."""
    layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
    return BlockPart(layers, range(chunk.first_head, chunk.first_head + chunk.num_heads))


def fill_in(chunk: kv_pb2.Chunk, blocks: range, part: BlockPart) -> None:
    """So that `blocks_of` and `part_of` give these again."""
    chunk.first_block, chunk.num_blocks = blocks.start, len(blocks)
    chunk.first_layer, chunk.num_layers = part.layers.start, len(part.layers)
    chunk.first_head, chunk.num_heads = part.heads.start, len(part.heads)


def checksum_of(payload: Payload) -> int:
    """xxh3-64 of bytes in main memory."""
    return xxhash.xxh3_64_intdigest(payload.numpy().data if isinstance(payload, Tensor) else payload)
