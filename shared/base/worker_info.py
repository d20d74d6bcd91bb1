"""What a worker says of itself: in the registry, in its status, and when two workers meet."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from hashlib import blake2b
from math import prod
from typing import NewType

PROTOCOL_VERSION = 1
MAX_ID_CHARS = 256  # of worker ids and names of models
_KV_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_SCALE_BYTES = 4  # one-byte types have a float32 scale per token (`shared/kernels/kv_layout.py`)


WorkerId = NewType("WorkerId", str)  # of a worker over all its starts
BootId = NewType("BootId", str)  # of one start of it


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # a decode worker that is never handed blocks: it prefills everything itself

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What two workers must agree on before blocks move between them."""

    weights_digest: str  # of the model's configuration and weights
    dtype: str  # what both compute in: it changes the last bits of what they store
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: str  # of stored keys and values

    @property
    def digest(self) -> str:
        """Hex digest of all fields and the protocol version. Package versions are not in it."""
        text = json.dumps([PROTOCOL_VERSION, *asdict(self).values()])
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def head_bytes(self) -> int:
        """Of one head's K, or V, in a block: the unit that blocks are cut into."""
        item_bytes = _KV_ITEM_BYTES[self.kv_dtype]
        token_bytes = self.head_dim * item_bytes + (_SCALE_BYTES if item_bytes == 1 else 0)
        return self.block_size * token_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """[L, 2, Hkv, head_bytes]: a block as bytes."""
        return self.num_layers, 2, self.num_kv_heads, self.head_bytes

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape)


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do now. Published with each heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not yet computed, of running and waiting sequences
    num_free_blocks: int = 0
    num_steps: int = 0  # grows while the engine makes progress
    prefill_tokens_per_s: float = 0.0  # measured, 0 until known


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's registry entry. `boot_id` is new at every start and voids all that an older one said."""

    worker_id: WorkerId
    boot_id: BootId
    role: Role
    address: str  # host:port of its gRPC server, as others reach it
    model: str  # served name
    digest: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    transports: tuple[str, ...] = ("grpc",)
    draining: bool = False
    load: Load = field(default_factory=Load)
    source: str = ""  # what --model said, a folder or a hub id: where a router finds the tokenizer
    revision: str = ""  # hub revision of `source`
