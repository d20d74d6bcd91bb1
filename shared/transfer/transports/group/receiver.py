"""NCCL and gloo, the receiver's end: chunks land in a staging buffer, and from there in the blocks after all checks.

    Join ──> store made ──> both meet there ──> message 0, 1, 2, … in order, each after its header has come by gRPC

A receive is posted only when a header says that there is something to receive: no kernel spins while nothing is sent. A sender that
broke off leaves the two out of step; then the communicator is thrown away on both sides, and the next transfer makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from torch import Tensor

from shared.base.errors import CorruptTransfer, Overloaded
from shared.base.worker_info import KvGeometry
from shared.rpc import kv_pb2
from shared.transfer.transports.chunks import chunk_bytes
from shared.transfer.transports.group.communicator import RECEIVER_RANK, Communicator, serve_store
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import GLOO, LinkLost, Route

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 16 * 1024 * 1024  # of staging at each end
_JOIN_TIMEOUT_S = 3.0
_MAX_LINKS = 256  # each has a thread, a socket and a store


class GroupLanding:
    max_chunk_bytes = MAX_CHUNK_BYTES

    def __init__(self, transport: str, link: _Link, on_lost: Callable[[], None]) -> None:
        self.transport = transport
        # What gloo sends crosses a network in the open; NCCL's bytes never come to main memory, where a checksum could be taken.
        self.has_checksums = transport == GLOO
        self._link = link
        self._on_lost = on_lost
        self._staged: Tensor | None = None
        link.landings.add(self)

    async def grant(self, block_ids: Sequence[int]) -> Sequence[int]:
        return ()

    @asynccontextmanager
    async def arrival(self, chunk: kv_pb2.Chunk) -> AsyncIterator[None]:
        self._staged = await self._link.receive(chunk)
        try:
            yield
        finally:
            self._staged = None

    def payload(self, chunk: kv_pb2.Chunk) -> Tensor:
        if self._staged is None:
            raise CorruptTransfer("the chunk's bytes have not come")
        return self._staged

    def close(self) -> None:
        self._link.landings.discard(self)

    def fence(self) -> asyncio.Future[None] | None:
        self.close()
        return None  # only the receiver itself writes to its blocks

    def lost(self) -> None:
        self._on_lost()


class _Link:
    """One sending process. Parcels are received in the order of their numbers, whichever attempt they belong to."""

    def __init__(self, communicator: Communicator, geometry: KvGeometry) -> None:
        self.landings: set[GroupLanding] = set()
        self.ended = asyncio.Event()
        self._communicator = communicator
        self._geometry = geometry
        self._next_message = 0
        self._turn = asyncio.Condition()

    async def receive(self, chunk: kv_pb2.Chunk) -> Tensor:
        """The bytes of the chunk. They are received also if the caller is cancelled: the next message comes after them."""
        task = asyncio.create_task(self._receive(chunk.message_number, chunk_bytes(self._geometry, chunk)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told here or, after a cancellation, to nobody
        return await asyncio.shield(task)

    async def _receive(self, number: int, size_bytes: int) -> Tensor:
        async with self._turn:
            await self._turn.wait_for(lambda: self._next_message >= number or self.ended.is_set())
            try:
                if self.ended.is_set() or self._next_message != number:
                    raise LinkLost("messages are out of step")
                staged = await self._communicator.receive(size_bytes)
                self._next_message += 1
            except LinkLost:
                self.ended.set()
                raise
            finally:
                self._turn.notify_all()
            return staged

    def end(self) -> None:
        self.ended.set()
        self._communicator.discard()
        for landing in list(self.landings):
            self.landings.discard(landing)
            landing.lost()


class GroupAcceptor:
    def __init__(
        self, transport: str, pools: PoolGroup, boot_id: str, listen_host: str, address: Callable[[], str], timeout_s: float
    ) -> None:
        """The rendezvous listens at `listen_host`; `address` gives the name that others reach this machine by, once it is known."""
        self.name = transport
        self._geometry = pools.geometry
        self._device = pools.shards[0].pool.device  # where chunks land, whichever pools their heads then go to
        self._boot_id = boot_id
        self._listen_host = listen_host
        self._address = address
        self._timeout_s = timeout_s
        self._links: dict[bytes, _Link] = {}

    def offer(self) -> kv_pb2.Offer:
        return kv_pb2.Offer(transport=self.name)

    async def join(self, request: kv_pb2.JoinRequest) -> AsyncIterator[kv_pb2.JoinReply]:
        """Serves one communicator from its making to its end."""
        if request.boot_id != self._boot_id or len(request.link_id) != 16 or request.link_id in self._links:
            raise LinkLost("this is not the worker that was meant")
        if len(self._links) >= _MAX_LINKS:
            raise Overloaded(f"this worker has {_MAX_LINKS} communicators; it makes no more")
        address = self._address()
        communicator = Communicator(self.name, self._device, RECEIVER_RANK, self._timeout_s)
        link = self._links[request.link_id] = _Link(communicator, self._geometry)
        try:
            store, port = await asyncio.to_thread(serve_store, self._listen_host, request.link_id, _JOIN_TIMEOUT_S)
            yield kv_pb2.JoinReply(store_host=address, store_port=port)
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                await communicator.join(lambda: store, address)
            yield kv_pb2.JoinReply()
            await link.ended.wait()
        except TimeoutError:
            raise LinkLost("the sender did not come to the rendezvous") from None
        except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
            raise LinkLost(f"no rendezvous could be made: {error}") from None
        finally:
            del self._links[request.link_id]
            link.end()

    def landing(self, route: Route, on_lost: Callable[[], None]) -> GroupLanding:
        link = self._links.get(route.link_id)
        if link is None or link.ended.is_set():
            raise LinkLost("the communicator is gone")
        return GroupLanding(self.name, link, on_lost)

    async def close(self) -> None:
        for link in list(self._links.values()):
            link.ended.set()
