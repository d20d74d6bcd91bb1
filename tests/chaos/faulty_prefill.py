"""A real prefill worker whose chunks go wrong on demand: `twostroke prefill` with another connector for gRPC.

The file named by CHAOS_CHUNKS_FILE holds what is wrong now: one of `ChunkFault`'s values, or nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.prefill.server import PrefillService
from shared.base.worker_info import Role
from shared.engine.memory.kv_pool import KvPool
from shared.options.config import parse_config
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2_grpc, kv_pb2
from shared.transfer.handoff.links import Links
from shared.transfer.transports.grpc import GrpcConnector, GrpcLink, GrpcWriter
from shared.transfer.transports.interface import Announce, Peer
from shared.worker.worker import Front, Service, Worker, run_worker
from tests.chaos import blockable
from tests.chaos.chunk_fault import CHUNKS_FILE_VARIABLE, ChunkFault


class FaultyWriter(GrpcWriter):
    def __init__(self, file: Path, lease_s: float) -> None:
        self._file = file
        self._lease_s = lease_s

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        await super().ship(chunk, pool, block_ids, lambda: self._announce(chunk, announce))

    async def _announce(self, chunk: kv_pb2.Chunk, announce: Announce) -> None:
        fault = self._file.read_text().strip()
        if fault == ChunkFault.MISSING.value:
            return
        if fault == ChunkFault.LATE.value:
            await asyncio.sleep(1.5 * self._lease_s)
        if fault == ChunkFault.CORRUPT.value:
            chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
        await announce()
        if fault == ChunkFault.DUPLICATE.value:
            await announce()


class FaultyLink(GrpcLink):
    def __init__(self, file: Path, lease_s: float) -> None:
        self._file = file
        self._lease_s = lease_s

    def writer(self) -> FaultyWriter:
        return FaultyWriter(self._file, self._lease_s)


class FaultyConnector(GrpcConnector):
    def __init__(self, file: Path, lease_s: float) -> None:
        self._link = FaultyLink(file, lease_s)

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> FaultyLink:
        return self._link


def faulty_front(worker: Worker) -> Front:
    links = Links([FaultyConnector(Path(os.environ[CHUNKS_FILE_VARIABLE]), worker.config.transfer_timeout_s)])
    service = PrefillService(worker, worker.engine, worker.streams, worker.channels, links)
    prefill = Service(control_pb2_grpc.add_PrefillServicer_to_server, service, "twostroke.v1.Prefill")
    return Front([prefill], links.transports, links.close)


if __name__ == "__main__":
    blockable.install()
    run_worker(parse_config(WorkerConfig, sys.argv[1:], "faulty_prefill", os.environ), Role.PREFILL, faulty_front)
