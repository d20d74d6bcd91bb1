"""A transport within one process, complete, and with every fault that a wire can have.

It behaves like shared memory: the sender writes into the receiver's pool, and an attempt that ends early is fenced. `FakeWire` is
what a test holds in its hand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto

from shared.base.errors import StaleTransfer
from shared.engine.memory.block_part import as_slice
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.transports.chunks import part_of
from shared.transfer.transports.interface import Announce, LinkLost, Peer, Route

NAME = "fake"
MAX_CHUNK_BYTES = 4096


class Fault(Enum):
    DROP = auto()  # the header is never sent
    DUPLICATE = auto()  # the header is sent twice
    REORDER = auto()  # the header comes after the next one
    CORRUPT_HEADER = auto()  # it speaks of other blocks
    DIE = auto()  # the sending process is gone after it has written


class FakeWire:
    def __init__(self) -> None:
        self.faults: dict[int, Fault] = {}  # by sequence number; each happens once
        self.may_write = asyncio.Event()  # cleared: a delay before each chunk
        self.may_answer = asyncio.Event()  # cleared: a sender that is stopped
        self.may_write.set()
        self.may_answer.set()
        self.link: FakeLink | None = None
        self.acceptor: FakeAcceptor | None = None


class FakeWriter:
    def __init__(self, link: FakeLink, writer_id: int) -> None:
        self.route = Route(NAME, b"fake", writer_id)
        self.is_closed = False
        self._link = link
        self._reply = kv_pb2.OpenReply()
        self._late: Announce | None = None

    def opened(self, reply: kv_pb2.OpenReply) -> None:
        self._reply = reply

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        wire = self._link.wire
        await wire.may_write.wait()
        if self.is_closed:
            raise StaleTransfer("the receiver has ended this attempt")
        if not self._link.is_alive or wire.acceptor is None:
            raise LinkLost("the fake link is gone")
        begin = chunk.first_block - self._reply.num_cached_blocks
        for source, target in zip(block_ids, self._reply.block_ids[begin : begin + chunk.num_blocks], strict=True):
            layers, heads = as_slice(part_of(chunk).layers), as_slice(part_of(chunk).heads)
            wire.acceptor.pool.blocks[target, layers, :, heads] = pool.blocks[source, layers]
        await self._announce(chunk, announce, wire.faults.pop(chunk.sequence_number, None))

    def close(self) -> None:
        self.is_closed = True

    async def _announce(self, chunk: kv_pb2.Chunk, announce: Announce, fault: Fault | None) -> None:
        match fault:
            case Fault.DROP:
                return
            case Fault.REORDER:
                self._late = announce
                return
            case Fault.DUPLICATE:
                await announce()
            case Fault.CORRUPT_HEADER:
                chunk.first_block += 1
            case Fault.DIE:
                self._link.die()
                return
        await announce()
        if self._late is not None:
            late, self._late = self._late, None
            await late()


class FakeLink:
    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire
        self.is_alive = True
        self.writers: dict[int, FakeWriter] = {}
        self._writer_ids = itertools.count(1)

    def writer(self) -> FakeWriter:
        writer = FakeWriter(self, next(self._writer_ids))
        self.writers[writer.route.writer_id] = writer
        return writer

    def discard(self) -> None:
        self.die()

    def die(self) -> None:
        self.is_alive = False
        if self.wire.acceptor is not None:
            self.wire.acceptor.sender_died()


class FakeConnector:
    name = NAME

    def __init__(self, wire: FakeWire) -> None:
        self._wire = wire

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> FakeLink:
        if self._wire.acceptor is None:
            raise LinkLost("nobody is at the other end")
        self._wire.link = FakeLink(self._wire)
        return self._wire.link


class FakeLanding:
    transport = NAME
    max_chunk_bytes = MAX_CHUNK_BYTES
    has_checksums = False

    def __init__(self, acceptor: FakeAcceptor, writer_id: int, on_lost: Callable[[], None]) -> None:
        self._acceptor = acceptor
        self._writer_id = writer_id
        self._on_lost = on_lost
        self._fence: asyncio.Future[None] | None = None
        self._answer: asyncio.Task[None] | None = None

    async def grant(self, block_ids: Sequence[int]) -> Sequence[int]:
        return block_ids

    @asynccontextmanager
    async def arrival(self, chunk: kv_pb2.Chunk) -> AsyncIterator[None]:
        yield

    def payload(self, chunk: kv_pb2.Chunk) -> None:
        return None

    def close(self) -> None:
        self._acceptor.landings.pop(self._writer_id, None)

    def fence(self) -> asyncio.Future[None] | None:
        link = self._acceptor.wire.link
        if link is None or not link.is_alive:
            self.close()
            return None
        self._fence = asyncio.get_running_loop().create_future()
        self._answer = asyncio.create_task(self._wait_for_answer(link))
        return self._fence

    def lost(self) -> None:
        self.close()
        if self._fence is None:
            self._on_lost()
        elif not self._fence.done():
            self._fence.set_result(None)

    async def _wait_for_answer(self, link: FakeLink) -> None:
        await link.wire.may_answer.wait()
        link.writers[self._writer_id].close()
        self.close()
        if self._fence is not None and not self._fence.done():
            self._fence.set_result(None)


class FakeAcceptor:
    name = NAME

    def __init__(self, wire: FakeWire, pool: KvPool) -> None:
        self.wire = wire
        self.pool = pool
        self.landings: dict[int, FakeLanding] = {}
        wire.acceptor = self

    def offer(self) -> kv_pb2.Offer:
        return kv_pb2.Offer(transport=NAME)

    def landing(self, route: Route, on_lost: Callable[[], None]) -> FakeLanding:
        if self.wire.link is None or not self.wire.link.is_alive:
            raise LinkLost("the fake link is gone")
        landing = self.landings[route.writer_id] = FakeLanding(self, route.writer_id, on_lost)
        return landing

    def sender_died(self) -> None:
        for landing in list(self.landings.values()):
            landing.lost()

    async def close(self) -> None:
        self.wire.acceptor = None
