"""The Decode service: a Generate stream to the engine and back.

    Generate without handoff    submit ─> tokens
    Generate with handoff       expect ─> (KvTransfer: open, push, commit) ─> tokens
    StopChoice                  one of the outputs ends, the others go on

The stream owns everything the request holds here. When it ends, for whatever reason, the engine's sequences are aborted (a no-op if
they have finished) and the reservation is given back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from shared.base.errors import IncompatiblePeer, Unavailable
from shared.base.request import FinishReason, Output, Request
from shared.engine.engine import Engine
from shared.engine.schedule.plan import Event, Failure
from shared.rpc import control_pb2, control_pb2_grpc
from shared.transfer.handoff.receiver import Receiver
from shared.wire.conversions import output_to_wire, request_from_wire
from shared.worker.heartbeat import or_heartbeat
from shared.worker.streams import Streams
from shared.worker.worker import Worker

_HEARTBEAT = control_pb2.GenerateReply()


class DecodeService(control_pb2_grpc.DecodeServicer):
    def __init__(self, worker: Worker, engine: Engine, streams: Streams, receiver: Receiver | None) -> None:
        """`receiver` is None on a colocated worker, which computes every prompt itself."""
        self._worker = worker
        self._engine = engine
        self._streams = streams
        self._receiver = receiver

    async def Generate(self, message: control_pb2.GenerateRequest, context: Any) -> AsyncIterator[control_pb2.GenerateReply]:
        if self._worker.is_draining:
            raise Unavailable("this worker is draining")
        request = request_from_wire(message.request)
        self._worker.check_tokens(request)
        mailbox = self._streams.open(request.request_id, partial(self._engine.abort, request.request_id))
        transfer_id = message.handoff.transfer_id if message.HasField("handoff") else b""
        release = None
        try:
            release = self._accept(request, transfer_id)
            yield control_pb2.GenerateReply(accepted=control_pb2.Accepted(boot_id=self._worker.boot_id))
            unfinished = set(range(request.sampling.n))
            while unfinished:
                events = await or_heartbeat(mailbox.take)
                if events is None:
                    yield _HEARTBEAT
                    continue
                outputs = _merge(events, unfinished)
                if outputs:
                    yield control_pb2.GenerateReply(tokens=[output_to_wire(output) for output in outputs])
                for event in events:
                    if isinstance(event, Failure):
                        raise event.error
                unfinished -= {output.choice for output in outputs if output.finish_reason is not None}
        finally:
            self._streams.close(request.request_id)
            if release is not None:
                release()

    async def StopChoice(self, message: control_pb2.StopChoiceRequest, context: Any) -> control_pb2.StopChoiceReply:
        if self._engine.stop_choice(message.request_id, message.choice):
            # Behind what the engine's thread has said already.
            self._streams.post([Output(message.request_id, message.choice, (), FinishReason.STOP)])
        return control_pb2.StopChoiceReply()

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


def _merge(events: Iterable[Event], unfinished: set[int]) -> list[Output]:
    """One output for each of the unfinished choices that has news. What the engine said about one after it ended is left out:
    where a choice is stopped, its last tokens may still be on their way."""
    merged: dict[int, Output] = {}
    for event in events:
        if not isinstance(event, Output) or event.choice not in unfinished:
            continue
        so_far = merged.get(event.choice)
        if so_far is None:
            merged[event.choice] = event
        elif so_far.finish_reason is None:
            merged[event.choice] = replace(so_far, tokens=so_far.tokens + event.tokens, finish_reason=event.finish_reason)
    return list(merged.values())
