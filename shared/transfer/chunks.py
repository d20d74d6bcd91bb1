"""Size and checksum of a chunk, the same at both ends."""

from __future__ import annotations

import xxhash
from torch import Tensor

from shared.rpc import kv_pb2
from shared.transfer.interface import Payload
from shared.worker_info import KvGeometry


def chunk_bytes(geometry: KvGeometry, chunk: kv_pb2.Chunk) -> int:
    """`geometry` is the whole model's."""
    return chunk.num_blocks * chunk.num_layers * 2 * chunk.num_heads * geometry.head_bytes


def checksum_of(payload: Payload) -> int:
    """xxh3-64 of bytes in host memory."""
    return xxhash.xxh3_64_intdigest(payload.numpy().data if isinstance(payload, Tensor) else payload)
