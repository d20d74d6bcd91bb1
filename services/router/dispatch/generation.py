"""One request on its way through the workers, whatever happens to them (DESIGN: the life of a request, and failure).

    place ─> Generate (decode) ─> Prefill (prefill) ─> tokens …            the common path
                 │                     └ fails: another prefill, same reservation; then decode computes the prompt itself
                 └ fails: the tokens so far become part of the prompt, and another pair continues at the next index

Every token has an absolute index. It is passed on exactly once and in order: a repeated one is dropped, a gap is a failure of the
worker that left it. Sampling depends on (seed, position) alone, so the continuation is what the first worker would have produced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc

from services.router.dispatch import metrics
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.placement import Placement
from shared.base.errors import DeadlineExceeded, Internal, InvalidRequest, Overloaded, TwostrokeError, Unavailable
from shared.base.request import Output, Request, choice_seed
from shared.base.worker_info import BootId, WorkerInfo
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import output_from_wire, request_to_wire
from shared.wire.errors import from_rpc_error

log = logging.getLogger(__name__)

_MAX_FAILURES = 5  # of one request without a new token in between: it may be what kills its workers
_MAX_PREFILL_ATTEMPTS = 3


class LegFailed(Exception):
    """One leg of a request ended with an error that another worker may not have. `reached`: the worker had taken the request on,
    so that the request may be what broke it."""

    def __init__(self, leg: str, worker: WorkerInfo, error: TwostrokeError, reached: bool = True) -> None:
        super().__init__(f"{leg} {worker.worker_id}: {error.message}")
        self.reached = reached
        self.leg = leg
        self.worker = worker
        self.error = error


class _Choice:
    """What one output of the request has got so far."""

    def __init__(self, request: Request, index: int) -> None:
        self.index = index
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.is_finished = False
        self.has_started = False

    def accept(self, output: Output) -> Output | None:
        """The part of `output` that is new, or None. Raises Internal if tokens are missing before it."""
        next_index = len(self.token_ids) - self.num_prompt_tokens
        tokens = tuple(t for t in output.tokens if t.index >= next_index)
        if tokens and tokens[0].index != next_index:
            raise Internal(f"token {tokens[0].index} came when {next_index} was due")
        if not tokens and output.finish_reason is None:
            return None
        self.token_ids.extend(t.token_id for t in tokens)
        # Tokens computed again after a failover are not a prefix hit of the client's.
        num_cached_tokens = 0 if self.has_started else output.num_cached_tokens
        self.has_started = True
        self.is_finished = output.finish_reason is not None
        return replace(output, choice=self.index, tokens=tokens, num_cached_tokens=num_cached_tokens)


class Generation:
    """Async iterator of the request's outputs. `aclose` ends it and, through cancellation, everything it holds at workers."""

    def __init__(self, fleet: Fleet, request: Request, deadline_s: float, worker_wait_s: float) -> None:
        self._fleet = fleet
        self._request = request
        self._deadline = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._worker_wait_s = worker_wait_s
        self._choices = [_Choice(request, i) for i in range(request.sampling.n)]
        self._outputs: asyncio.Queue[Output | TwostrokeError | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._num_attempts = 0

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Output:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        item = await self._outputs.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, TwostrokeError):
            raise item
        return item

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def serve_at(self, placement: Placement) -> None:
        """Serves the request there and nowhere else; outputs are dropped. Raises LegFailed."""
        await self._serve(self._request, self._choices, placement)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._remaining_s()):
                await self._drive(self._request, self._choices)
            self._outputs.put_nowait(None)
        except TimeoutError:
            self._outputs.put_nowait(DeadlineExceeded(f"the request took longer than {self._deadline_s:.0f} s"))
        except TwostrokeError as error:
            self._outputs.put_nowait(error)
        except Exception:
            log.exception("request %s failed", self._request.request_id)
            self._outputs.put_nowait(Internal("the router failed on this request"))

    async def _drive(self, request: Request, choices: Sequence[_Choice]) -> None:
        """Serves `choices` of `request` until all have finished, over as many workers as it takes."""
        exclude: set[BootId] = set()
        may_hand_off = True
        num_failures = 0
        give_up = self._give_up_at()
        while True:
            placement = await self._place(request, exclude, give_up)
            if not may_hand_off:
                placement = Placement(prefill=None, decode=placement.decode)
            try:
                return await self._serve(request, choices, placement)
            except LegFailed as failure:
                failed = failure
            self._note_failure(failed)
            unfinished = [c for c in choices if not c.is_finished]
            if not unfinished:
                return None
            if any(len(c.token_ids) > len(request.token_ids) for c in unfinished):
                return await self._continue(unfinished)
            if failed.reached:
                num_failures += 1
                give_up = self._give_up_at()
            if num_failures == _MAX_FAILURES or time.monotonic() >= give_up:
                raise failed.error
            if failed.leg == "decode":
                exclude.add(failed.worker.boot_id)
            else:
                may_hand_off = False

    async def _continue(self, choices: Sequence[_Choice]) -> None:
        """Each unfinished output goes on alone, as a request whose prompt ends with the tokens it already has."""
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    sampling = self._request.sampling
                    sampling = replace(sampling, n=1, seed=choice_seed(sampling.seed, choice.index))
                    request = replace(self._request, token_ids=tuple(choice.token_ids), sampling=sampling)
                    group.create_task(self._drive(request, [choice]))
        except* TwostrokeError as errors:
            raise errors.exceptions[0] from None

    def _give_up_at(self) -> float:
        """How long to wait from now on for a worker that takes the request: one that died is usually back soon."""
        return min(self._deadline, time.monotonic() + self._worker_wait_s)

    async def _place(self, request: Request, exclude: set[BootId], give_up: float) -> Placement:
        """Waits while nobody can serve."""
        while True:
            try:
                return await self._fleet.place(request, exclude)
            except Unavailable as error:
                exclude.clear()
                try:
                    async with asyncio.timeout(give_up - time.monotonic()):
                        await self._fleet.wait_for_change()
                except TimeoutError:
                    raise error from None

    async def _serve(self, request: Request, choices: Sequence[_Choice], placement: Placement) -> None:
        """One Generate stream, with its prefill if it has one. Raises LegFailed, or the client's own error."""
        self._num_attempts += 1
        request = replace(request, request_id=f"{self._request.request_id}-{self._num_attempts}")
        decode = placement.decode
        transfer_id = os.urandom(16)
        message = control_pb2.GenerateRequest(sequence=request_to_wire(request))
        if placement.prefill is not None:
            message.handoff.transfer_id = transfer_id
        stub = control_pb2_grpc.DecodeStub(self._fleet.channel(decode))
        call = stub.Generate(message, timeout=self._remaining_s())
        prefill: asyncio.Task[None] | None = None
        try:
            accepted = await _read(call, decode, reached=False)
            if placement.prefill is not None:
                destination = control_pb2.Destination(
                    transfer_id=transfer_id, address=decode.address, boot_id=accepted.accepted.boot_id
                )
                prefill = asyncio.create_task(self._prefill(request, placement.prefill, decode, destination))
                reply = await _first_reply(call, decode, prefill)
            else:
                reply = await _read(call, decode)
            while True:
                for tokens in reply.tokens:
                    self._emit(tokens, choices, decode)
                if all(c.is_finished for c in choices):
                    self._fleet.succeeded(decode)
                    return
                reply = await _read(call, decode)
        finally:
            call.cancel()
            if prefill is not None:
                prefill.cancel()
                await asyncio.gather(prefill, return_exceptions=True)

    def _emit(self, tokens: control_pb2.Tokens, choices: Sequence[_Choice], decode: WorkerInfo) -> None:
        output = output_from_wire(self._request.request_id, tokens)
        if not 0 <= output.choice < len(choices):
            raise LegFailed("decode", decode, Internal(f"choice {output.choice} of {len(choices)}"))
        try:
            new = choices[output.choice].accept(output)
        except Internal as error:
            raise LegFailed("decode", decode, error) from None
        if new is not None:
            self._outputs.put_nowait(new)

    async def _prefill(
        self, request: Request, prefill: WorkerInfo, decode: WorkerInfo, destination: control_pb2.Destination
    ) -> None:
        """Has the prompt computed and delivered, by another prefill worker if the first fails. Raises LegFailed."""
        exclude: set[BootId] = set()
        for attempt in range(_MAX_PREFILL_ATTEMPTS):
            destination.attempt = attempt
            message = control_pb2.PrefillRequest(sequence=request_to_wire(request), destination=destination)
            stub = control_pb2_grpc.PrefillStub(self._fleet.channel(prefill))
            try:
                reply = await stub.Prefill(message, timeout=self._remaining_s())
                self._fleet.succeeded(prefill)
                self._fleet.observe_transfer(prefill, reply.transfer_s)
                metrics.observe_prefill(reply)
                return
            except grpc.RpcError as error:
                failed = _leg_failed("prefill", prefill, error)
            if not isinstance(failed, LegFailed) or isinstance(failed.error, Overloaded):
                raise failed  # no other prefill worker would fare better: the mistake is the client's, or decode is full
            exclude.add(prefill.boot_id)
            another = await self._another_prefill(request, decode, exclude)
            if another is None or attempt == _MAX_PREFILL_ATTEMPTS - 1:
                raise failed
            self._note_failure(failed)
            prefill = another

    async def _another_prefill(self, request: Request, decode: WorkerInfo, exclude: set[BootId]) -> WorkerInfo | None:
        try:
            return (await self._fleet.place(request, exclude, digest=decode.digest, decode=decode)).prefill
        except Unavailable:  # the decode worker drains or is listed no more, though its stream may still be there
            return None

    def _note_failure(self, failed: LegFailed) -> None:
        log.warning("request %s: %s", self._request.request_id, failed)
        metrics.failovers.labels(failed.leg, failed.error.kind).inc()
        if not isinstance(failed.error, Overloaded):
            self._fleet.failed(failed.worker)

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


async def _first_reply(call: Any, decode: WorkerInfo, prefill: asyncio.Task[None]) -> Any:
    """The first tokens, or the prefill's failure, whichever comes first."""
    read = asyncio.ensure_future(_read(call, decode))
    try:
        await asyncio.wait({read, prefill}, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            await prefill  # raises if it failed; if it succeeded, the tokens are on their way
        return await read
    finally:
        read.cancel()


async def _read(call: Any, decode: WorkerInfo, reached: bool = True) -> Any:
    try:
        reply = await call.read()
    except grpc.RpcError as error:
        raise _leg_failed("decode", decode, error, reached) from None
    if reply is grpc.aio.EOF:
        raise LegFailed("decode", decode, Unavailable("the stream ended early"), reached)
    return reply


def _leg_failed(leg: str, worker: WorkerInfo, rpc_error: grpc.RpcError, reached: bool = True) -> Exception:
    """The client's own mistakes are the answer; everything else is a failure of the leg. (The request's own deadline is kept by
    `Generation._run`; a DEADLINE_EXCEEDED here is a step inside the leg that took too long.)"""
    error = from_rpc_error(rpc_error)
    return error if isinstance(error, InvalidRequest) else LegFailed(leg, worker, error, reached)
