"""Messages of a transfer, as a right sender of the fake runner's geometry sends them, with what a test wants changed."""

from __future__ import annotations

import xxhash

from shared.rpc import kv_pb2, request_pb2
from tests.support.fake_runner import GEOMETRY

BOOT = "boot"


def key_of(attempt: int = 0, boot: str = BOOT, transfer: bytes = b"t" * 16) -> kv_pb2.TransferKey:
    return kv_pb2.TransferKey(transfer_id=transfer, attempt=attempt, boot_id=boot)


def geometry_of(**changes: object) -> kv_pb2.KvGeometry:
    fields: dict[str, object] = {
        "digest": GEOMETRY.digest, "num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "block_size": 16, "kv_dtype": "float32",
    }  # fmt: skip
    return kv_pb2.KvGeometry(**(fields | changes))  # type: ignore[arg-type]


def chunk_of(number: int, first: int, count: int = 1, /, **changes: object) -> kv_pb2.Chunk:
    data = bytes(GEOMETRY.block_bytes * count)
    fields: dict[str, object] = {
        "sequence_number": number, "first_block": first, "num_blocks": count, "num_layers": 2, "num_heads": 2,
        "checksum": xxhash.xxh3_64_intdigest(data), "data": data,
    }  # fmt: skip
    return kv_pb2.Chunk(**(fields | changes))  # type: ignore[arg-type]


def commit_of(num_blocks: int, num_chunks: int = 1, /, **changes: object) -> kv_pb2.Commit:
    fields: dict[str, object] = {
        "num_chunks": num_chunks, "num_blocks": num_blocks, "first_tokens": [request_pb2.Token(index=0, token_id=7)],
    }  # fmt: skip
    return kv_pb2.Commit(**(fields | changes))  # type: ignore[arg-type]
