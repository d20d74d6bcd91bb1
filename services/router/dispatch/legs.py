"""One call to a worker as a leg of a request: its messages, and the ways in which it fails.

A leg fails by an error of the worker's, by a call that ends early or is cut off, or by silence. All
are `LegFailed`: another worker may do better. Only the client's own mistake is raised as it is,
because it would be one everywhere.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from services.router.dispatch import metrics
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.silence import MAX_SILENCE_S, SilenceWatch
from shared.base.errors import Internal, InvalidRequest, Overloaded, TwostrokeError, Unavailable
from shared.base.worker_info import WorkerInfo
from shared.wire.errors import from_rpc_error

_OF_THE_ROUTER = {"request_id", "transfer_id", "address"}  # parameters that no client gives


class LegFailed(Exception):
    """One leg of a request ended with an error that another worker may not have. `reached`: the worker had taken the request on,
    so that the request may be what broke it."""

    def __init__(self, leg: str, worker: WorkerInfo, error: TwostrokeError, reached: bool = True) -> None:
        super().__init__(f"{leg} {worker.worker_id}: {error.message}")
        self.leg = leg
        self.worker = worker
        self.error = error
        self.reached = reached


class LegStream:
    """The messages of one call, without its heartbeats."""

    def __init__(self, call: Any, leg: str, worker: WorkerInfo) -> None:
        self._call = call
        self._leg = leg
        self._worker = worker
        self._was_heard = False
        self._silence = SilenceWatch(call.cancel)

    async def read(self) -> Any:
        """The next message. Raises LegFailed, or InvalidRequest for the client's mistake."""
        while True:
            message = await self._read()
            if message.ByteSize() > 0:
                return message

    def failed(self, error: TwostrokeError) -> LegFailed:
        return LegFailed(self._leg, self._worker, error, self._was_heard)

    def close(self) -> None:
        """Ends the call, and what the worker holds for it. Idempotent."""
        self._silence.close()
        self._call.cancel()

    async def _read(self) -> Any:
        self._silence.begin()
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise self._of_the_worker(from_rpc_error(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self.failed(self._why_cut_off()) from None  # the call was cancelled, not this task
        finally:
            self._silence.end()
        if message is grpc.aio.EOF:
            raise self.failed(Unavailable("the stream ended early"))
        self._was_heard = True
        return message

    def _of_the_worker(self, error: TwostrokeError) -> Exception:
        if not isinstance(error, InvalidRequest):
            return self.failed(error)
        return self.failed(Internal(error.message)) if error.param in _OF_THE_ROUTER else error

    def _why_cut_off(self) -> Unavailable:
        return Unavailable(f"silent for {MAX_SILENCE_S:g} s" if self._silence.has_rung else "the call was cut off")


def note_failure(fleet: Fleet, failed: LegFailed) -> None:
    metrics.failovers.labels(failed.leg, failed.error.kind).inc()
    if not isinstance(failed.error, Overloaded):  # a full worker does its work
        fleet.failed(failed.worker, failed.error)
