"""Device memory that is not: memfds stand for what a GPU would export, across processes too. As on a GPU, a copy that was begun has
not been made yet, and is made only when somebody waits for it; a test can hold that back."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import as_slice
from shared.rpc import kv_pb2
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.mapped.cuda_ipc import CudaExported, CudaMapper
from shared.transfer.transports.mapped.link import MappedConnector
from shared.transfer.transports.mapped.memory import Copy
from shared.transfer.transports.mapped.receiver import MappedAcceptor


class FakeDevice:
    def __init__(self, pools: PoolGroup | None = None) -> None:
        """`pools`, in shared storage, are what can be exported."""
        self.may_finish = asyncio.Event()  # cleared: copies are under way
        self.may_settle = asyncio.Event()  # cleared: the receiver's own work is under way
        self.may_finish.set()
        self.may_settle.set()
        self.num_mapped = 0
        self._fds: dict[int, int] = {}
        for shard in pools.shards if pools is not None else ():
            assert shard.pool.shared_storage is not None
            self._fds[shard.pool.blocks.data_ptr()] = shard.pool.shared_storage.fd
        self._begun: list[tuple[Tensor, Callable[[], None]]] = []

    def export(self, blocks: Tensor) -> kv_pb2.CudaMemory:
        handle = f"/proc/{os.getpid()}/fd/{self._fds[blocks.data_ptr()]}"
        return kv_pb2.CudaMemory(ipc_handle=handle.encode(), device_uuid="fake")

    def open(self, memory: kv_pb2.CudaMemory, size_bytes: int) -> Tensor:
        fd = os.open(memory.ipc_handle.decode(), os.O_RDWR)
        try:
            mapped = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        finally:
            os.close(fd)
        self.num_mapped += 1
        return mapped

    def close(self, mapped: Tensor) -> None:
        assert not self._begun, "unmapped under a copy's feet"
        self.num_mapped -= 1

    def begin(self, source: Tensor, target: Tensor, copy: Copy) -> None:
        self._begun.append((target, lambda: _copy(source, target, copy)))

    async def finish(self, target: Tensor) -> None:
        await self.may_finish.wait()
        for begun, make in self._begun:
            if begun.data_ptr() == target.data_ptr():
                make()
        self._begun = [item for item in self._begun if item[0].data_ptr() != target.data_ptr()]

    async def settle(self, device: torch.device) -> None:
        await self.may_settle.wait()


def _copy(source: Tensor, target: Tensor, copy: Copy) -> None:
    for from_id, to_id in zip(copy.sources, copy.targets, strict=True):
        layers, ours, theirs = as_slice(copy.layers), as_slice(copy.source_heads), as_slice(copy.target_heads)
        target[to_id, layers, :, theirs] = source[from_id, layers, :, ours]


def fake_cuda_acceptor(pools: PoolGroup, boot_id: str, device: FakeDevice | None = None) -> MappedAcceptor:
    return MappedAcceptor(CudaExported(pools, device or FakeDevice(pools)), boot_id)


def fake_cuda_connector(geometry: KvGeometry, device: FakeDevice | None = None) -> MappedConnector:
    return MappedConnector(CudaMapper(device or FakeDevice()), geometry)
