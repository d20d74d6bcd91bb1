"""The prefill leg: a prompt is computed and delivered to the decode worker that waits for it.

If the first prefill worker fails, another one takes over.
"""

from __future__ import annotations

from services.router.dispatch import metrics
from services.router.dispatch.budget import Budget
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.legs import LegFailed, LegStream, note_failure
from shared.base.errors import Overloaded, Unavailable
from shared.base.request import Request
from shared.base.worker_info import BootId, WorkerInfo
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import request_to_wire

_MAX_ATTEMPTS = 3


class PrefillLeg:
    """All attempts are of one transfer, whose reservation stays at the decode worker."""

    def __init__(self, fleet: Fleet, request: Request, decode: WorkerInfo, transfer_id: bytes, budget: Budget) -> None:
        self._fleet = fleet
        self._request = request
        self._decode = decode
        self._transfer_id = transfer_id
        self._budget = budget

    async def run(self, prefill: WorkerInfo) -> None:
        """Returns when the decode worker has the prompt. Raises LegFailed, or InvalidRequest for the client's mistake."""
        exclude: set[BootId] = set()
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return await self._attempt(prefill, attempt)
            except LegFailed as error:
                failed = error
            exclude.add(prefill.boot_id)
            # Where decode is full, no other prefill worker would fare better.
            is_last = attempt == _MAX_ATTEMPTS - 1 or isinstance(failed.error, Overloaded)
            another = None if is_last else await self._another(exclude)
            if another is None:
                raise failed
            note_failure(self._fleet, failed)
            prefill = another

    async def _attempt(self, prefill: WorkerInfo, attempt: int) -> None:
        destination = control_pb2.Destination(
            transfer_id=self._transfer_id, attempt=attempt, address=self._decode.address, boot_id=self._decode.boot_id
        )
        message = control_pb2.PrefillRequest(request=request_to_wire(self._request), destination=destination)
        call = control_pb2_grpc.PrefillStub(self._fleet.channel(prefill)).Prefill(message, timeout=self._budget.call_timeout_s)
        stream = LegStream(call, "prefill", prefill)
        try:
            reply = (await stream.read()).reply
        finally:
            stream.close()
        self._fleet.succeeded(prefill)
        self._fleet.observe_transfer(prefill, reply.transfer_s)
        metrics.observe_prefill(reply)

    async def _another(self, exclude: set[BootId]) -> WorkerInfo | None:
        try:
            return (await self._fleet.place(self._request, exclude, decode=self._decode)).prefill
        except Unavailable:  # the decode worker drains or is listed no more, though its stream may still be there
            return None
