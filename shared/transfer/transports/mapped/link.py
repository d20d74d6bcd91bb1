"""Shared memory and CUDA IPC, the sender's end: the receiver's pools are mapped here, and blocks are copied straight into them.

All writing is begun on the event loop, between two awaits. The receiver's order to end an attempt is read on the same loop: when it
is read, the attempt's writer is closed, so nothing more will be begun for it, and the answer is sent when all that was begun before
has ended. So the answer is a proof.

If the receiver dies the kernel closes the socket, and the mapping goes at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shared.base.errors import CorruptTransfer, StaleTransfer
from shared.base.worker_info import KvGeometry
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.transports.chunks import part_of
from shared.transfer.transports.heads import common_heads, within
from shared.transfer.transports.interface import Announce, LinkLost, Peer, Route
from shared.transfer.transports.mapped.memory import Copy, Mapper, PeerPool
from shared.transfer.transports.mapped.socket import (
    GOODBYE,
    MAX_MESSAGE_BYTES,
    is_same_user,
    machine_id,
    pack_writer_id,
    receive_greeting,
    unpack_writer_id,
)

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0


class MappedWriter:
    def __init__(self, link: MappedLink, writer_id: int) -> None:
        self.route = Route(link.transport, link.link_id, writer_id)
        self.is_closed = False
        self._link = link
        self._targets: Sequence[int] = ()
        self._first_target = 0  # the prompt's block that targets[0] is for

    def opened(self, reply: kv_pb2.OpenReply) -> None:
        allowed = self._link.num_blocks
        if outside := [block_id for block_id in reply.block_ids if block_id >= allowed]:
            raise CorruptTransfer(f"the receiver grants block {outside[0]} of pools of {allowed} blocks")
        self._first_target = reply.num_cached_blocks
        self._targets = reply.block_ids

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        begin = chunk.first_block - self._first_target
        targets = self._targets[begin : begin + chunk.num_blocks] if begin >= 0 else ()
        if len(targets) != len(block_ids):
            raise CorruptTransfer(f"the receiver granted {len(targets)} of the {len(block_ids)} blocks from {chunk.first_block} on")
        per_turn = max(1, self._link.bytes_per_turn // pool.geometry.block_bytes)
        for start in range(0, len(block_ids), per_turn):
            if start:
                await asyncio.sleep(0)
            self._check_open()
            self._link.begin(chunk, pool, block_ids[start : start + per_turn], targets[start : start + per_turn])
        await self._link.finish()
        self._check_open()
        await announce()

    def close(self) -> None:
        self.is_closed = True
        self._link.forget(self.route.writer_id)

    def _check_open(self) -> None:
        if self.is_closed:
            raise StaleTransfer("the receiver has ended this attempt")


@dataclass(frozen=True, slots=True)
class MappedHeads:
    """One of the receiver's pools, and the model's KV heads that it holds."""

    heads: range
    pool: PeerPool
    num_blocks: int


class MappedLink:
    def __init__(self, connection: socket.socket, link_id: bytes, mapper: Mapper, pools: Sequence[MappedHeads]) -> None:
        self.transport = mapper.name
        self.link_id = link_id
        self.is_alive = True
        self.bytes_per_turn = mapper.bytes_per_turn
        self.num_blocks = min(peer.num_blocks for peer in pools)  # a granted block is in every pool
        self._connection = connection
        self._pools = pools
        self._writers: dict[int, MappedWriter] = {}
        self._writer_ids = itertools.count(GOODBYE + 1)
        self._task = asyncio.create_task(self._serve(), name=f"{mapper.name}-link")
        self._task.add_done_callback(self._end)

    def begin(self, chunk: kv_pb2.Chunk, pool: KvPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        """`pool` holds the chunk's heads; each goes to the pool of the receiver that has it."""
        if not self.is_alive:
            raise LinkLost("the decode worker's memory is gone")
        part = part_of(chunk)
        for peer in self._pools:
            heads = common_heads(peer.heads, part.heads)
            if heads:
                ours, theirs = within(heads, part.heads.start), within(heads, peer.heads.start)
                peer.pool.begin(pool, Copy(sources, targets, part.layers, ours, theirs))

    async def finish(self) -> None:
        for peer in self._pools:
            await peer.pool.finish()

    def writer(self) -> MappedWriter:
        writer = MappedWriter(self, next(self._writer_ids))
        self._writers[writer.route.writer_id] = writer
        return writer

    def forget(self, writer_id: int) -> None:
        self._writers.pop(writer_id, None)

    def discard(self) -> None:
        self.is_alive = False
        self._task.cancel()

    async def _serve(self) -> None:
        """Answers until the receiver or this process ends the link. The goodbye, and the socket's end, are what proves to the
        receiver that nothing is written any more; so they come last."""
        try:
            await self._answer_fences()
        except (OSError, ValueError) as error:
            log.warning("link to a decode worker of this machine failed: %s", error)
        finally:
            self.is_alive = False
            await self.finish()
            with suppress(OSError):
                self._connection.send(pack_writer_id(GOODBYE))

    def _end(self, task: asyncio.Task[None]) -> None:
        for peer in self._pools:
            peer.pool.unmap()
        self._connection.close()
        if not task.cancelled() and task.exception() is not None:
            log.error("the link to a decode worker of this machine ended badly", exc_info=task.exception())

    async def _answer_fences(self) -> None:
        loop = asyncio.get_running_loop()
        while message := await loop.sock_recv(self._connection, MAX_MESSAGE_BYTES):
            writer = self._writers.get(unpack_writer_id(message))
            if writer is not None:
                writer.close()
            await self.finish()
            await loop.sock_sendall(self._connection, message)


class MappedConnector:
    def __init__(self, mapper: Mapper, geometry: KvGeometry) -> None:
        """`geometry` is the whole model's: what the receiver's blocks look like when all heads are together."""
        self.name = mapper.name
        self._mapper = mapper
        self._geometry = geometry
        self._machine_id = machine_id()

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> MappedLink:
        if not self._machine_id or offer.machine_id != self._machine_id:
            raise LinkLost("the decode worker is on another machine")
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

    async def _greet(self, connection: socket.socket, peer: Peer, path: str) -> MappedLink:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, path)
            if not is_same_user(connection):
                raise OSError("it belongs to another user")
            await _readable(connection)
        greeting, fds = receive_greeting(connection)
        try:
            if greeting.boot_id != peer.boot_id:
                raise OSError("it is another worker's")
            pools = self._map_all(greeting, list(fds))
        finally:
            for fd in fds:
                os.close(fd)
        return MappedLink(connection, greeting.link_id, self._mapper, pools)

    def _map_all(self, greeting: kv_pb2.PoolGreeting, fds: list[int]) -> list[MappedHeads]:
        """All pools or, with an OSError, none."""
        mapped: list[MappedHeads] = []
        try:
            for memory in greeting.pools:
                geometry = replace(self._geometry, num_kv_heads=memory.num_heads)
                if memory.first_head + memory.num_heads > self._geometry.num_kv_heads:
                    raise OSError("it does not hold every head once")
                if not memory.num_heads or not memory.size_bytes or memory.size_bytes % geometry.block_bytes:
                    raise OSError("it holds other blocks")
                heads = range(memory.first_head, memory.first_head + memory.num_heads)
                mapped.append(
                    MappedHeads(heads, self._mapper.map(memory, fds, geometry), memory.size_bytes // geometry.block_bytes)
                )
            if [head for peer in mapped for head in peer.heads] != list(range(self._geometry.num_kv_heads)):
                raise OSError("it does not hold every head once")
        except OSError:
            for peer in mapped:
                peer.pool.unmap()
            raise
        return mapped


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)
