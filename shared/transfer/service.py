"""The KvTransfer service: wire to `Receiver` and back, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from shared.engine.plan import SampledToken
from shared.errors import CorruptTransfer
from shared.rpc import kv_pb2, kv_pb2_grpc, sequence_pb2
from shared.transfer.receiver import Receiver


class KvTransferService(kv_pb2_grpc.KvTransferServicer):
    def __init__(self, receiver: Receiver, timeout_s: float) -> None:
        self._receiver = receiver
        self._timeout_s = timeout_s

    async def Open(self, request: kv_pb2.OpenRequest, context: Any) -> kv_pb2.OpenReply:
        remaining_s = context.time_remaining()
        # Answer a little before the caller gives up, so that it learns why.
        timeout_s = self._timeout_s if remaining_s is None else min(self._timeout_s, 0.9 * remaining_s)
        return await self._receiver.open(request.key, request.geometry, request.num_blocks, timeout_s)

    async def Push(self, requests: AsyncIterator[kv_pb2.PushRequest], context: Any) -> kv_pb2.PushReply:
        async for request in requests:
            if request.WhichOneof("payload") == "chunk":
                self._receiver.apply(request.key, request.chunk)
            elif request.WhichOneof("payload") == "commit":
                self._receiver.commit(request.key, request.commit, [_sampled(t) for t in request.commit.first_tokens])
                return kv_pb2.PushReply()
            else:
                raise CorruptTransfer("a message has neither a chunk nor a commit")
        raise CorruptTransfer("the stream ended without a commit")

    async def Abort(self, request: kv_pb2.AbortRequest, context: Any) -> kv_pb2.AbortReply:
        return kv_pb2.AbortReply(was_live=self._receiver.abort(request.key))


def _sampled(token: sequence_pb2.Token) -> SampledToken:
    top = tuple((t.token_id, t.logprob) for t in token.top_logprobs)
    return SampledToken(token.token_id, token.logprob if token.HasField("logprob") else None, top)
