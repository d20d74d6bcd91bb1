"""Shared memory, the sender's end: the receiver's pool is mapped here, and blocks are copied straight into it.

All writing happens on the event loop, between two awaits. The receiver's order to end an attempt is read on the same loop: when it
is read no write is under way, and since the attempt's writer is closed none will follow. So the answer is a proof.

If the receiver dies the kernel closes the socket, and the mapping goes at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shared.engine.kv_pool import KvPool, split_blocks
from shared.errors import StaleTransfer
from shared.rpc import kv_pb2
from shared.transfer.chunks import layers_of
from shared.transfer.interface import SHM, Announce, LinkLost, Peer, Route
from shared.transfer.shm_socket import (
    MAX_MESSAGE_BYTES,
    is_same_user,
    machine_id,
    receive_hello,
    unpack_ticket,
)
from shared.worker_info import KvGeometry

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_BYTES_PER_ADVICE = 64 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
_BYTES_PER_TURN = 4 * 1024 * 1024  # about a millisecond of copying, then others of the event loop have theirs


class ShmWriter:
    def __init__(self, link: ShmLink, ticket: int) -> None:
        self.route = Route(SHM, link.link_id, ticket)
        self.is_closed = False
        self._link = link
        self._targets: Sequence[int] = ()
        self._first_target = 0  # the prompt's block that targets[0] is for

    def opened(self, reply: kv_pb2.OpenReply) -> None:
        self._first_target = reply.num_cached_blocks
        self._targets = reply.block_ids

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        begin = chunk.first_block - self._first_target
        targets = self._targets[begin : begin + chunk.num_blocks]
        per_turn = max(1, _BYTES_PER_TURN // pool.geometry.block_bytes)
        for start in range(0, len(block_ids), per_turn):
            if start:
                await asyncio.sleep(0)
            self._write(chunk, pool, block_ids[start : start + per_turn], targets[start : start + per_turn])
        await announce()

    def close(self) -> None:
        self.is_closed = True
        self._link.forget(self.route.ticket)

    def _write(self, chunk: kv_pb2.Chunk, pool: KvPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self.is_closed:
            raise StaleTransfer("the receiver has ended this attempt")
        layers, heads = layers_of(chunk), slice(chunk.first_head, chunk.first_head + chunk.num_heads)
        for source, target in zip(_host_blocks(pool, sources, layers), targets, strict=True):
            self._link.blocks[target, layers, :, heads] = source


def _host_blocks(pool: KvPool, block_ids: Sequence[int], layers: slice) -> Iterator[NDArray[np.uint8]]:
    """Each block, [layers, 2, heads, bytes of one head's tokens]: in place on a CPU, read from the device first on a GPU."""
    if pool.kv.device.type == "cpu":
        blocks = pool.host_blocks
        return (blocks[block_id, layers] for block_id in block_ids)
    read = np.frombuffer(pool.read_blocks(block_ids, layers), dtype=np.uint8)
    return iter(read.reshape(len(block_ids), layers.stop - layers.start, 2, pool.geometry.num_kv_heads, -1))


class ShmLink:
    def __init__(self, connection: socket.socket, link_id: bytes, memory: mmap.mmap, geometry: KvGeometry) -> None:
        self.link_id = link_id
        self._connection = connection
        self._blocks: NDArray[np.uint8] | None = split_blocks(np.frombuffer(memory, dtype=np.uint8), geometry)
        self._writers: dict[int, ShmWriter] = {}
        self._tickets = itertools.count(1)
        self._task = asyncio.create_task(self._answer_fences(), name="shm-link")
        self._task.add_done_callback(lambda _: self._end())

    @property
    def is_alive(self) -> bool:
        return self._blocks is not None

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """The receiver's pool: [NB, L, 2, Hkv, bytes of one head's tokens]."""
        if self._blocks is None:
            raise LinkLost("the decode worker's memory is gone")
        return self._blocks

    def peek(self) -> NDArray[np.uint8] | None:
        """`blocks`, or None when the mapping has gone. From any thread; not to be kept."""
        return self._blocks

    def writer(self) -> ShmWriter:
        ticket = next(self._tickets)
        return self._writers.setdefault(ticket, ShmWriter(self, ticket))

    def forget(self, ticket: int) -> None:
        self._writers.pop(ticket, None)

    def discard(self) -> None:
        self._task.cancel()
        self._unmap()

    async def _answer_fences(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while message := await loop.sock_recv(self._connection, MAX_MESSAGE_BYTES):
                writer = self._writers.get(unpack_ticket(message))
                if writer is not None:
                    writer.close()
                await loop.sock_sendall(self._connection, message)
        except (OSError, ValueError) as error:
            log.warning("link to a decode worker of this host failed: %s", error)

    def _unmap(self) -> None:
        """The mapping goes with its last user: nobody holds a view of it over an await."""
        self._blocks = None

    def _end(self) -> None:
        """The socket is closed last: to the receiver, its end proves that nothing is written any more."""
        self._unmap()
        self._connection.close()


def _map_pages(link: ShmLink) -> None:
    """Has the kernel enter the pool's pages into this process's page table: a fault for each at its first write would make the
    first transfers several times slower. On a thread: the call leaves the interpreter to others, but takes long (a GiB, 0.3 s)."""
    libc = ctypes.CDLL(None)
    start = 0
    while (blocks := link.peek()) is not None and start < blocks.nbytes:
        size_bytes = min(_BYTES_PER_ADVICE, blocks.nbytes - start)
        address = ctypes.c_void_p(blocks.ctypes.data + start)
        if libc.madvise(address, ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE):
            return  # a kernel older than 5.14: the pages come one by one
        start += size_bytes


class ShmConnector:
    name = SHM

    def __init__(self, geometry: KvGeometry) -> None:
        """`geometry` is the whole model's: what the receiver's blocks look like."""
        self._geometry = geometry
        self._machine_id = machine_id()

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> ShmLink:
        if not self._machine_id or offer.machine_id != self._machine_id:
            raise LinkLost("the decode worker is on another host")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            return await self._greet(connection, peer, offer.socket_path)
        except (OSError, TimeoutError) as error:
            connection.close()
            raise LinkLost(f"the decode worker's memory cannot be mapped: {error}") from None
        except BaseException:
            connection.close()
            raise

    async def _greet(self, connection: socket.socket, peer: Peer, path: str) -> ShmLink:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, path)
            if not is_same_user(connection):
                raise OSError("it belongs to another user")
            await _readable(connection)
        hello, fd = receive_hello(connection)
        try:
            if hello.boot_id != peer.boot_id or hello.size_bytes % self._geometry.block_bytes:
                raise OSError("it is another worker's")
            memory = mmap.mmap(fd, hello.size_bytes)
        finally:
            os.close(fd)
        link = ShmLink(connection, hello.link_id, memory, self._geometry)
        threading.Thread(target=_map_pages, args=(link,), name="shm-pages", daemon=True).start()
        return link


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
