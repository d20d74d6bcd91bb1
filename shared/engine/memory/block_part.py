"""A part of a block: some of its layers and some of its KV heads.

Both are ranges, everywhere: what is passed from function to function is a range, and only the line that indexes an array makes a
slice of it. On the wire a part is four numbers (`Chunk`), which `shared/transfer/transports/chunks.py` converts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.base.worker_info import KvGeometry


@dataclass(frozen=True, slots=True)
class BlockPart:
    layers: range
    heads: range

    @classmethod
    def whole(cls, geometry: KvGeometry) -> BlockPart:
        return cls(range(geometry.num_layers), range(geometry.num_kv_heads))


def as_slice(run: range) -> slice:
    """For indexing an array with consecutive numbers, as a view."""
    return slice(run.start, run.stop)
