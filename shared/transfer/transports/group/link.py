"""NCCL and gloo, the sender's end: blocks are gathered into a staging buffer, announced, and sent while the receiver takes them.

One message at a time, numbered. An abort lets the one under way arrive, so the communicator stays in step and is used again; only
a message that does not arrive in time costs the communicator. The Join call stays open beside it: its end is the link's end.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import torch

from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.transports.chunks import checksum_of, part_of
from shared.transfer.transports.group.communicator import SENDER_RANK, Communicator, connect_store
from shared.transfer.transports.interface import GLOO, Announce, LinkLost, Peer, Route
from shared.wire.errors import from_rpc_error

log = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 3.0


class GroupWriter:
    def __init__(self, link: GroupLink) -> None:
        self.route = link.route
        self._link = link

    def opened(self, reply: kv_pb2.OpenReply) -> None:
        pass

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        staged = pool.gather(block_ids, part_of(chunk).layers)
        if self.route.transport == GLOO:
            chunk.checksum = checksum_of(staged)
        await self._link.send(chunk, staged, announce)

    def close(self) -> None:
        pass  # messages under way land in the receiver's staging buffer, not in blocks


class GroupLink:
    def __init__(self, route: Route, communicator: Communicator, call: Any) -> None:
        self.route = route
        self._communicator = communicator
        self._call = call
        self._next_message = 0
        self._turn = asyncio.Lock()
        call.add_done_callback(lambda _: communicator.discard())

    @property
    def is_alive(self) -> bool:
        return self._communicator.is_alive

    def writer(self) -> GroupWriter:
        return GroupWriter(self)

    async def send(self, chunk: kv_pb2.Chunk, staged: torch.Tensor, announce: Announce) -> None:
        async with self._turn:
            if not self.is_alive:
                raise LinkLost("the communicator is gone")
            chunk.message_number = self._next_message
            self._next_message += 1
            try:
                await announce()
                await self._communicator.send(staged)
            except BaseException:  # the receiver may or may not have this number
                self.discard()
                raise

    def discard(self) -> None:
        self._communicator.discard()
        self._call.cancel()


class GroupConnector:
    def __init__(self, transport: str, device: torch.device, address: Callable[[], str], timeout_s: float) -> None:
        """`address` gives the name that others reach this machine by, once it is known."""
        self.name = transport
        self._device = device
        self._address = address
        self._timeout_s = timeout_s

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> GroupLink:
        route = Route(self.name, secrets.token_bytes(16))
        request = kv_pb2.JoinRequest(boot_id=peer.boot_id, transport=self.name, link_id=route.link_id)
        communicator = Communicator(self.name, self._device, SENDER_RANK, self._timeout_s)
        call = peer.stub.Join(request)
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                await self._meet(call, communicator, route.link_id)
        except BaseException as error:
            communicator.discard()
            call.cancel()
            if isinstance(error, grpc.RpcError):
                raise LinkLost(from_rpc_error(error).message) from None
            if isinstance(error, TimeoutError):
                raise LinkLost("the decode worker did not come to the rendezvous") from None
            raise
        return GroupLink(route, communicator, call)

    async def _meet(self, call: Any, communicator: Communicator, link_id: bytes) -> None:
        where = await call.read()
        if where is grpc.aio.EOF:
            raise LinkLost("the decode worker ended the rendezvous")
        host, port = where.store_host, where.store_port
        await communicator.join(lambda: connect_store(host, port, link_id, _JOIN_TIMEOUT_S), self._address())
        if await call.read() is grpc.aio.EOF:
            raise LinkLost("the decode worker ended the rendezvous")
