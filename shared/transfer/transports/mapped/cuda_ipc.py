"""Pools in GPU memory: the receiver exports its allocation, the sender of the same machine maps it and copies on the device.

Copies are only begun by the event loop and end later, so a chunk is announced, and a fence answered, after `finish`. The other way
round the receiver waits before it grants blocks: a kernel of its own that still uses what its scheduler has freed is not ordered
with another process's copies, as it would be with its own.

All that touches CUDA is behind `DeviceMemory` (`cuda_device.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shared.base.worker_info import KvGeometry
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import CUDA_IPC, LinkLost
from shared.transfer.transports.mapped.memory import Copy


class DeviceMemory(Protocol):
    """What this transport needs of a device. `blocks` are [NB, L, 2, heads, bytes of one head's tokens] uint8."""

    def export(self, blocks: Tensor) -> kv_pb2.CudaMemory:
        """Raises OSError if the allocation that it is in cannot be exported."""

    def open(self, memory: kv_pb2.CudaMemory, size_bytes: int) -> Tensor:
        """[size_bytes] uint8: another process's memory. Raises OSError if it cannot be mapped."""

    def close(self, mapped: Tensor) -> None: ...

    def begin(self, source: Tensor, target: Tensor, copy: Copy) -> None:
        """Between blocks on a device, not before what this process has begun on `source`. Does not wait for either."""

    async def finish(self, target: Tensor) -> None:
        """Returns when the copies begun to `target` have ended."""

    async def settle(self, device: torch.device) -> None:
        """Returns when all that this process has begun on the device has ended."""


class CudaExported:
    name = CUDA_IPC
    writes_outlive_their_process = True

    def __init__(self, pools: PoolGroup, memory: DeviceMemory) -> None:
        """Raises OSError if a pool cannot be exported."""
        self.fds: Sequence[int] = ()
        self.pools: Sequence[kv_pb2.PoolMemory] = [
            kv_pb2.PoolMemory(
                size_bytes=shard.pool.blocks.nbytes,
                first_head=shard.first_head,
                num_heads=len(shard.heads),
                cuda=memory.export(shard.pool.blocks),
            )
            for shard in pools.shards
        ]
        self._devices = {shard.pool.blocks.device for shard in pools.shards}
        self._memory = memory

    async def settle(self) -> None:
        for device in self._devices:
            await self._memory.settle(device)


class CudaPeerPool:
    def __init__(self, mapped: Tensor, geometry: KvGeometry, memory: DeviceMemory) -> None:
        self._mapped = mapped
        self._blocks: Tensor | None = mapped.view(-1, *geometry.block_shape)
        self._memory = memory

    def begin(self, pool: KvPool, copy: Copy) -> None:
        if self._blocks is None:
            raise LinkLost("the decode worker's memory is gone")
        self._memory.begin(pool.blocks, self._blocks, copy)

    async def finish(self) -> None:
        if self._blocks is not None:
            await self._memory.finish(self._blocks)

    def unmap(self) -> None:
        if self._blocks is not None:
            self._blocks = None
            self._memory.close(self._mapped)


class CudaMapper:
    name = CUDA_IPC
    bytes_per_turn = 64 * 1024 * 1024  # to begin a copy takes the same time for any size

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def map(self, memory: kv_pb2.PoolMemory, fds: list[int], geometry: KvGeometry) -> CudaPeerPool:
        if not memory.HasField("cuda"):
            raise OSError("it is not GPU memory")
        return CudaPeerPool(self._memory.open(memory.cuda, memory.size_bytes), geometry, self._memory)
