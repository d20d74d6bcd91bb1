"""The transport that works everywhere: a chunk's bytes are a field of its gRPC message, paced by HTTP/2 flow control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.transports.chunks import checksum_of, part_of
from shared.transfer.transports.interface import GRPC, Announce, Peer, Route

# Measured (docs/performance.md): below 512 KiB the cost of a message shows, and above 2 MiB chunks no longer fit the caches.
MAX_CHUNK_BYTES = 1024 * 1024


class GrpcWriter:
    route = Route(GRPC)

    def opened(self, reply: kv_pb2.OpenReply) -> None:
        pass

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        data = pool.read_blocks(block_ids, part_of(chunk).layers)
        chunk.checksum = checksum_of(data)
        chunk.data = data if isinstance(data, bytes) else bytes(data)
        await announce()

    def close(self) -> None:
        pass


class GrpcLink:
    """Nothing is shared between attempts: the channel belongs to others, and heals by itself."""

    is_alive = True

    def writer(self) -> GrpcWriter:
        return GrpcWriter()

    def discard(self) -> None:
        pass


class GrpcConnector:
    name = GRPC

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> GrpcLink:
        return GrpcLink()


class GrpcLanding:
    transport = GRPC
    has_checksums = True

    def __init__(self, max_chunk_bytes: int) -> None:
        self.max_chunk_bytes = max_chunk_bytes

    async def grant(self, block_ids: Sequence[int]) -> Sequence[int]:
        return ()

    @asynccontextmanager
    async def arrival(self, chunk: kv_pb2.Chunk) -> AsyncIterator[None]:
        yield

    def payload(self, chunk: kv_pb2.Chunk) -> bytes:
        return chunk.data

    def close(self) -> None:
        pass

    def fence(self) -> asyncio.Future[None] | None:
        return None  # only the receiver itself writes to its blocks


class GrpcAcceptor:
    name = GRPC

    def __init__(self, max_chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        self._max_chunk_bytes = max_chunk_bytes

    def offer(self) -> kv_pb2.Offer:
        return kv_pb2.Offer(transport=GRPC)

    def landing(self, route: Route, on_lost: Callable[[], None]) -> GrpcLanding:
        return GrpcLanding(self._max_chunk_bytes)

    async def close(self) -> None:
        pass
