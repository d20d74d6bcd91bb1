"""The receiver's pools in the sender's address space: what shared memory and CUDA IPC have in common, and what each must say.

    receiver                                         sender
    Exported   its pools, as they are handed out ──> Mapper ──> PeerPool     one per pool of the receiver
    MappedAcceptor, MappedLanding                        MappedConnector, MappedLink, MappedWriter: the same for both

Who may write and until when is settled by the classes below the line, in `receiver.py` and `link.py`; how bytes get from
one memory into the other is all that the classes here know (`shm.py`, `cuda_ipc.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.base.worker_info import KvGeometry
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2


class Exported(Protocol):
    """The receiver's end."""

    name: str  # of the transport
    writes_outlive_their_process: bool  # a while: the device may still be at work when the kernel closes a dead process's socket
    pools: Sequence[kv_pb2.PoolMemory]
    fds: Sequence[int]  # of those pools that are main memory

    async def settle(self) -> None:
        """Returns when all that this process has begun on the pools until now has ended. What it frees it may still be using."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Some layers and heads of blocks `sources` of the sender's pool are to become those of blocks `targets` of the receiver's."""

    sources: Sequence[int]
    targets: Sequence[int]
    layers: range
    source_heads: range
    target_heads: range


class PeerPool(Protocol):
    """The sender's end: one of the receiver's pools."""

    def begin(self, pool: KvPool, copy: Copy) -> None:
        """Copies from `pool`, or begins to."""

    async def finish(self) -> None:
        """Returns when all copies begun here have ended."""

    def unmap(self) -> None:
        """The memory is not touched after this. Only after `finish`. Idempotent."""


class Mapper(Protocol):
    name: str  # of the transport
    bytes_per_turn: int  # how much is copied before others of the event loop have their turn

    def map(self, memory: kv_pb2.PoolMemory, fds: list[int], geometry: KvGeometry) -> PeerPool:
        """`geometry` is that of the receiver's pool. Takes from the front of `fds` what it needs and leaves closing to the caller.
        Raises OSError if the memory cannot be mapped here."""
