"""The Decode service: a Generate stream to the engine and back.

    Generate without handoff    submit ─> tokens
    Generate with handoff       expect ─> (KvTransfer: open, push, commit) ─> tokens

The stream owns everything the request holds here. When it ends, for whatever reason, the engine's sequences are aborted (a no-op if
they have finished) and the reservation is given back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from shared.base.errors import IncompatiblePeer, Unavailable
from shared.base.request import Output, Request
from shared.engine.engine import Engine
from shared.engine.schedule.plan import Event, Failure
from shared.rpc import control_pb2, control_pb2_grpc
from shared.transfer.handoff.receiver import Receiver
from shared.wire.conversions import output_to_wire, request_from_wire
from shared.worker.streams import Streams
from shared.worker.worker import Worker


class DecodeService(control_pb2_grpc.DecodeServicer):
    def __init__(self, worker: Worker, engine: Engine, streams: Streams[Event], receiver: Receiver | None) -> None:
        """`receiver` is None on a colocated worker, which computes every prompt itself."""
        self._worker = worker
        self._engine = engine
        self._streams = streams
        self._receiver = receiver

    async def Generate(self, message: control_pb2.GenerateRequest, context: Any) -> AsyncIterator[control_pb2.GenerateReply]:
        if self._worker.is_draining:
            raise Unavailable("this worker is draining")
        request = request_from_wire(message.sequence)
        self._worker.check_tokens(request)
        events = self._streams.open(request.request_id)
        transfer_id = message.handoff.transfer_id if message.HasField("handoff") else b""
        release = None
        try:
            release = self._accept(request, transfer_id)
            yield control_pb2.GenerateReply(accepted=control_pb2.Accepted(boot_id=self._worker.boot_id))
            num_open = request.sampling.n
            while num_open:
                event = await events.get()
                if isinstance(event, Failure):
                    raise event.error
                if isinstance(event, Output):
                    num_open -= event.finish_reason is not None
                    yield output_to_wire(event)
        finally:
            self._streams.close(request.request_id)
            if release is not None:
                release()

    def _accept(self, request: Request, transfer_id: bytes) -> Callable[[], object]:
        """Takes the request on. Returns what gives back all that it holds: for a transfer that is the receiver's to do, which knows
        whether the sender could still write to the blocks."""
        if not transfer_id:
            self._engine.submit(request)
            return partial(self._engine.abort, request.request_id)
        if self._receiver is None:
            raise IncompatiblePeer("this worker is colocated; it takes no handoff")
        self._receiver.expect(transfer_id, request)
        return partial(self._receiver.forget, transfer_id)
