"""The Prefill service: compute a prompt, ship its blocks while the rest is computed, sample the first token, commit.

    submit(hold) ─> first chunk starts ─> Open ─┐
                    some layers computed ──────>├─ Push those of finished blocks      (the next layers compute meanwhile)
                    chunk computed ────────────>├─ Push the rest of them              (the next chunk computes meanwhile)
                    first tokens ──────────────>└─ Push the rest, Commit ─> acknowledged ─> release

The call owns the sequence and its reservation at the receiver. If it ends early, both are given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from services.prefill.shipment import Shipment
from shared.base.address import Address
from shared.base.errors import InvalidRequest, Unavailable
from shared.engine.engine import Engine
from shared.process.tasks import cancel_and_wait
from shared.rpc import control_pb2, control_pb2_grpc
from shared.transfer.handoff.links import Links
from shared.transfer.handoff.sender import Sender
from shared.transfer.transports.heads import HeadShard
from shared.wire.channels import Channels
from shared.wire.conversions import request_from_wire
from shared.worker.heartbeat import heartbeats_until
from shared.worker.streams import Streams
from shared.worker.worker import Worker

_HEARTBEAT = control_pb2.PrefillEvent()


class PrefillService(control_pb2_grpc.PrefillServicer):
    def __init__(self, worker: Worker, engine: Engine, streams: Streams, channels: Channels, links: Links) -> None:
        self._worker = worker
        self._engine = engine
        self._streams = streams
        self._channels = channels
        self._links = links

    async def Prefill(self, message: control_pb2.PrefillRequest, context: Any) -> AsyncIterator[control_pb2.PrefillEvent]:
        work = asyncio.create_task(self._prefill(message))
        try:
            async for _ in heartbeats_until(work):
                yield _HEARTBEAT
            yield control_pb2.PrefillEvent(reply=work.result())
        finally:
            await cancel_and_wait(work)

    async def _prefill(self, message: control_pb2.PrefillRequest) -> control_pb2.PrefillReply:
        if self._worker.is_draining:
            raise Unavailable("this worker is draining")
        request = request_from_wire(message.request)
        self._worker.check_tokens(request)
        _check(message.destination)
        worker = self._worker
        channel = self._channels.get(message.destination.address)
        shards = [HeadShard(worker.pool)]
        timeout_s = worker.config.transfer_timeout_s
        sender = Sender(self._links, channel, message.destination, worker.geometry, shards, timeout_s)
        mailbox = self._streams.open(request.request_id)
        try:
            sequence = self._engine.submit(request, hold=True)
            reply = await Shipment(sequence, sender, worker.geometry).run(mailbox)
            self._engine.release(request.request_id)
            return reply
        except BaseException as error:
            # Blocks are being read until the sender has stopped: stop it first, then free them.
            await asyncio.shield(sender.abort(type(error).__name__))
            raise
        finally:
            self._streams.close(request.request_id)
            self._engine.abort(request.request_id)


def _check(destination: control_pb2.Destination) -> None:
    if len(destination.transfer_id) != 16:
        raise InvalidRequest("destination.transfer_id must have 16 bytes", param="transfer_id")
    try:
        Address.parse(destination.address)
    except ValueError as error:
        raise InvalidRequest(f"destination.address: {error}", param="address") from None
