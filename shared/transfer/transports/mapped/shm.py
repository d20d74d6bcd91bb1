"""Pools in main memory: the receiver's is a memfd, which the sender maps and copies into with its CPU."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import as_slice
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import SHM, LinkLost
from shared.transfer.transports.mapped.memory import Copy

_BYTES_PER_ADVICE = 64 * 1024 * 1024
_MADV_POPULATE_WRITE = 23


class ShmExported:
    name = SHM
    writes_outlive_their_process = False  # its threads did them

    def __init__(self, pools: PoolGroup) -> None:
        """Every pool must have shared storage."""
        storages = [shard.pool.shared_storage for shard in pools.shards]
        self.fds: Sequence[int] = [storage.fd for storage in storages if storage is not None]
        assert len(self.fds) == len(storages), "a pool is private memory"
        self.pools: Sequence[kv_pb2.PoolMemory] = [
            kv_pb2.PoolMemory(size_bytes=shard.pool.blocks.nbytes, first_head=shard.first_head, num_heads=len(shard.heads))
            for shard in pools.shards
        ]

    async def settle(self) -> None:
        pass  # what a CPU has begun has ended when its thread says so


class ShmPeerPool:
    def __init__(self, memory: mmap.mmap, geometry: KvGeometry) -> None:
        self._blocks: NDArray[np.uint8] | None = np.frombuffer(memory, dtype=np.uint8).reshape(-1, *geometry.block_shape)

    def begin(self, pool: KvPool, copy: Copy) -> None:
        if self._blocks is None:
            raise LinkLost("the decode worker's memory is gone")
        layers, ours, theirs = as_slice(copy.layers), as_slice(copy.source_heads), as_slice(copy.target_heads)
        for source, target in zip(_layers_of_blocks(pool, copy.sources, copy.layers), copy.targets, strict=True):
            self._blocks[target, layers, :, theirs] = source[:, :, ours]

    async def finish(self) -> None:
        pass

    def unmap(self) -> None:
        """The mapping goes with its last user: nobody holds a view of it over an await."""
        self._blocks = None

    def enter_pages(self) -> None:
        """Has the kernel enter the pool's pages into this process's page table: a fault for each at its first write would make the
        first transfers several times slower. For a thread: it leaves the interpreter to others, but takes long (a GiB, 0.3 s)."""
        libc = ctypes.CDLL(None)
        start = 0
        while (blocks := self._blocks) is not None and start < blocks.nbytes:
            size_bytes = min(_BYTES_PER_ADVICE, blocks.nbytes - start)
            address = ctypes.c_void_p(blocks.ctypes.data + start)
            if libc.madvise(address, ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE):
                return  # a kernel older than 5.14: the pages come one by one
            start += size_bytes


class ShmMapper:
    name = SHM
    bytes_per_turn = 4 * 1024 * 1024  # about a millisecond of copying

    def map(self, memory: kv_pb2.PoolMemory, fds: list[int], geometry: KvGeometry) -> ShmPeerPool:
        if memory.HasField("cuda") or not fds:
            raise OSError("it is not main memory")
        try:
            mapped = mmap.mmap(fds.pop(0), memory.size_bytes)
        except (ValueError, OverflowError) as error:  # more than the file has, which could not be read without a fault
            raise OSError(str(error)) from None
        pool = ShmPeerPool(mapped, geometry)
        threading.Thread(target=pool.enter_pages, name="shm-pages", daemon=True).start()
        return pool


def _layers_of_blocks(pool: KvPool, block_ids: Sequence[int], layers: range) -> Iterator[NDArray[np.uint8]]:
    """Each block, [layers, 2, heads, bytes of one head's tokens]: in place on a CPU, read from the device first on a GPU."""
    if pool.device.type == "cpu":
        blocks = pool.cpu_blocks
        return (blocks[block_id, as_slice(layers)] for block_id in block_ids)
    read = np.frombuffer(pool.read_blocks(block_ids, layers), dtype=np.uint8)
    return iter(read.reshape(len(block_ids), len(layers), *pool.blocks.shape[2:]))
