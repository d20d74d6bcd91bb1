"""Shared memory and CUDA IPC, the receiver's end: hands the pools to senders of this machine, and bars a sender from blocks that
must go back.

    connected ──PoolGreeting──> landing … landing          one connection per sending process
    attempt ends early: ──writer_id──> (the sender closes the writer) ──writer_id──> only now the blocks are free
    end of stream: the sending process is dead or has let go of the pools, all its blocks are free

A sender that is stopped does not answer, so the few blocks of its attempts stay reserved until it goes on or dies.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from shared.process.tasks import cancel_and_wait
from shared.rpc import kv_pb2
from shared.transfer.transports.interface import LinkLost, Route
from shared.transfer.transports.mapped.memory import Exported
from shared.transfer.transports.mapped.socket import (
    GOODBYE,
    MAX_MESSAGE_BYTES,
    ProcessEnd,
    is_same_user,
    listen_privately,
    machine_id,
    pack_writer_id,
    send_greeting,
    unpack_writer_id,
)

log = logging.getLogger(__name__)

# Large, because only the header of a chunk is sent; small enough that a chunk takes little of its lease.
MAX_CHUNK_BYTES = 64 * 1024 * 1024


class MappedLanding:
    max_chunk_bytes = MAX_CHUNK_BYTES
    has_checksums = False  # the copy is from memory to memory, under the hardware's own checks, and as fast as a checksum

    def __init__(self, sender: _Sender, writer_id: int, on_lost: Callable[[], None]) -> None:
        self.transport = sender.exported.name
        self._sender = sender
        self._writer_id = writer_id
        self._fence: asyncio.Future[None] | None = None
        self._on_lost = on_lost

    async def grant(self, block_ids: Sequence[int]) -> Sequence[int]:
        await self._sender.exported.settle()
        return block_ids

    @asynccontextmanager
    async def arrival(self, chunk: kv_pb2.Chunk) -> AsyncIterator[None]:
        yield

    def payload(self, chunk: kv_pb2.Chunk) -> None:
        return None

    def close(self) -> None:
        self._sender.landings.pop(self._writer_id, None)

    def fence(self) -> asyncio.Future[None] | None:
        if not self._sender.is_alive:
            return None
        self._fence = asyncio.get_running_loop().create_future()
        self._sender.orders.put_nowait(self._writer_id)
        return self._fence

    def answered(self) -> None:
        """The sender says that it will not write any more. Unasked, this means nothing."""
        if self._fence is not None:
            self.close()
            self._fence.set_result(None)

    def lost(self) -> None:
        if self._fence is not None:
            self._fence.set_result(None)
        else:
            self._on_lost()


class _Sender:
    """One sending process, from its connection to its end."""

    def __init__(self, connection: socket.socket, exported: Exported) -> None:
        """Raises OSError if the process's end could not be noticed."""
        self.exported = exported
        self.link_id = secrets.token_bytes(16)
        self.landings: dict[int, MappedLanding] = {}
        self.orders: asyncio.Queue[int] = asyncio.Queue()  # ids of the writers to end
        self.is_alive = True
        self._connection = connection
        self._process_end = ProcessEnd(connection) if exported.writes_outlive_their_process else None

    async def serve(self) -> None:
        """Returns when the sender is gone. Cancelled, it says nothing about the sender, so the blocks stay where they are."""
        ordering = asyncio.create_task(self._send_orders())
        try:
            said_goodbye = await self._read_answers()
            if self._process_end is not None and not said_goodbye:
                await self._process_end.wait()
        finally:
            await cancel_and_wait(ordering)
        self.is_alive = False
        for landing in list(self.landings.values()):
            landing.lost()
        self.landings.clear()

    def close(self) -> None:
        if self._process_end is not None:
            self._process_end.close()

    async def _read_answers(self) -> bool:
        """Until the end of the stream; True if the sender said goodbye before it."""
        said_goodbye = False
        while message := await self._read_message():
            try:
                writer_id = unpack_writer_id(message)
            except ValueError as error:
                log.warning("a prefill worker of this machine sent an invalid message: %s", error)
                continue
            said_goodbye |= writer_id == GOODBYE
            landing = self.landings.get(writer_id)
            if landing is not None:
                landing.answered()
        return said_goodbye

    async def _read_message(self) -> bytes:
        loop = asyncio.get_running_loop()
        with suppress(ConnectionResetError):  # gone, with orders unread; said once, and what it has written is still there
            return await loop.sock_recv(self._connection, MAX_MESSAGE_BYTES)
        return await loop.sock_recv(self._connection, MAX_MESSAGE_BYTES)

    async def _send_orders(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await loop.sock_sendall(self._connection, pack_writer_id(await self.orders.get()))


class MappedAcceptor:
    def __init__(self, exported: Exported, boot_id: str) -> None:
        """Listens at once, in a folder that only this user can enter."""
        self.name = exported.name
        self._exported = exported
        self._boot_id = boot_id
        self._senders: dict[bytes, _Sender] = {}
        self._listener, self._path = listen_privately()
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name=f"{exported.name}-acceptor")

    def offer(self) -> kv_pb2.Offer:
        return kv_pb2.Offer(transport=self.name, machine_id=machine_id(), socket_path=str(self._path))

    def landing(self, route: Route, on_lost: Callable[[], None]) -> MappedLanding:
        sender = self._senders.get(route.link_id)
        if sender is None or route.writer_id in sender.landings:
            raise LinkLost("the sender is not connected to this worker's memory")
        landing = sender.landings[route.writer_id] = MappedLanding(sender, route.writer_id, on_lost)
        return landing

    async def close(self) -> None:
        """Senders see the end of the stream and unmap."""
        for task in (self._accepting, *self._serving):
            await cancel_and_wait(task)
        self._listener.close()
        shutil.rmtree(self._path.parent, ignore_errors=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            if not is_same_user(connection):
                log.warning("a process of another user asked for this worker's memory")
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(partial(self._served, connection))

    def _served(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        try:
            sender = _Sender(connection, self._exported)
        except OSError as error:
            log.warning("a prefill worker of this machine gets no memory: %s", error)
            return
        # Known before it is greeted: its first Open may be here before this task runs again.
        self._senders[sender.link_id] = sender
        try:
            greeting = kv_pb2.PoolGreeting(boot_id=self._boot_id, link_id=sender.link_id, pools=self._exported.pools)
            send_greeting(connection, greeting, self._exported.fds)
            await sender.serve()
        finally:
            del self._senders[sender.link_id]
            sender.close()
