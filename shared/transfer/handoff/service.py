"""The KvTransfer service: wire to `Receiver` and back, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from shared.base.errors import CorruptTransfer, InvalidRequest
from shared.rpc import kv_pb2, kv_pb2_grpc
from shared.transfer.handoff.receiver import Receiver
from shared.transfer.transports.group.receiver import GroupAcceptor
from shared.transfer.transports.interface import GRPC, Route


class KvTransferService(kv_pb2_grpc.KvTransferServicer):
    def __init__(self, receiver: Receiver, timeout_s: float) -> None:
        self._receiver = receiver
        self._timeout_s = timeout_s

    async def GetOffers(self, request: kv_pb2.OffersRequest, context: Any) -> kv_pb2.OffersReply:
        return kv_pb2.OffersReply(offers=self._receiver.acceptors.offers())

    async def Join(self, request: kv_pb2.JoinRequest, context: Any) -> AsyncIterator[kv_pb2.JoinReply]:
        acceptor = self._receiver.acceptors.find(request.transport)
        if not isinstance(acceptor, GroupAcceptor):
            raise InvalidRequest(f"transport is {request.transport!r}; it has no communicator to join", param="transport")
        async for reply in acceptor.join(request):
            yield reply

    async def Open(self, request: kv_pb2.OpenRequest, context: Any) -> kv_pb2.OpenReply:
        remaining_s = context.time_remaining()
        # Answer a little before the caller gives up, so that it learns why.
        timeout_s = self._timeout_s if remaining_s is None else min(self._timeout_s, 0.9 * remaining_s)
        route = Route(request.transport or GRPC, request.link_id, request.writer_id)
        return await self._receiver.open(request.key, request.geometry, request.num_blocks, timeout_s, route)

    async def Push(self, requests: AsyncIterator[kv_pb2.PushRequest], context: Any) -> kv_pb2.PushReply:
        key = kv_pb2.TransferKey()
        try:
            async for request in requests:
                key = request.key
                if request.WhichOneof("payload") == "chunk":
                    await self._receiver.receive(key, request.chunk)
                elif request.WhichOneof("payload") == "commit":
                    self._receiver.commit(key, request.commit)
                    return kv_pb2.PushReply()
                else:
                    raise CorruptTransfer("a message has neither a chunk nor a commit")
            raise CorruptTransfer("the stream ended without a commit")
        finally:
            self._receiver.abort(key)  # an attempt has one stream: without it there is nothing to wait for

    async def Abort(self, request: kv_pb2.AbortRequest, context: Any) -> kv_pb2.AbortReply:
        return kv_pb2.AbortReply(was_live=self._receiver.abort(request.key))
