"""One attempt at some choices of a request: a Generate stream at one decode worker, with a prefill
if it has one.

    Generate ─> accepted ─> Prefill (beside it) ─> tokens … ─> every choice has ended

Whatever ends it closes both legs, and with them all that the workers hold for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from services.router.dispatch.budget import Budget
from services.router.dispatch.choices import Choice
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.legs import LegFailed, LegStream
from services.router.dispatch.placement import Placement
from services.router.dispatch.prefill_leg import PrefillLeg
from shared.base.errors import Internal, TwostrokeError, Unavailable
from shared.base.request import Output, Request
from shared.process.tasks import cancel_and_wait
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import output_from_wire, request_to_wire

_STOP_CHOICE_TIMEOUT_S = 2.0

PassOn = Callable[[Choice, Output], Awaitable[None]]  # takes an output as the worker gave it to the choice that it is of


class Attempt:
    def __init__(
        self, fleet: Fleet, request: Request, choices: Sequence[Choice], placement: Placement, budget: Budget, pass_on: PassOn
    ) -> None:
        """`request`: with an id of this attempt's own, and as many outputs as there are `choices`."""
        self._fleet = fleet
        self._request = request
        self._choices = choices
        self._placement = placement
        self._budget = budget
        self._pass_on = pass_on
        self._stub = control_pb2_grpc.DecodeStub(fleet.channel(placement.decode))
        self._stream: LegStream | None = None

    async def run(self) -> None:
        """Returns when all choices have ended. Raises LegFailed, or InvalidRequest for the client's mistake."""
        decode, prefill, transfer_id = self._placement.decode, self._placement.prefill, os.urandom(16)
        message = control_pb2.GenerateRequest(request=request_to_wire(self._request))
        if prefill is not None:
            message.handoff.transfer_id = transfer_id
        self._stream = stream = LegStream(self._stub.Generate(message, timeout=self._budget.call_timeout_s), "decode", decode)
        delivery: asyncio.Task[None] | None = None
        try:
            await self._wait_until_accepted(stream)
            if prefill is not None:
                leg = PrefillLeg(self._fleet, self._request, decode, transfer_id, self._budget)
                delivery = asyncio.create_task(leg.run(prefill))
            reply = await _first_reply(stream, delivery)
            while not await self._have_all_ended(stream, reply):
                reply = await stream.read()
        except LegFailed:
            if not all(choice.has_ended for choice in self._choices):  # else: closed by `stop`
                raise
        finally:
            stream.close()
            await cancel_and_wait(delivery)
        self._fleet.succeeded(decode)

    def stop(self, choice: Choice) -> None:
        """`choice`, which has been stopped, may be one of this attempt's: its worker need not go on with it."""
        if self._stream is None or choice not in self._choices:
            return
        if all(choice.has_ended for choice in self._choices):
            self._stream.close()
            return
        message = control_pb2.StopChoiceRequest(request_id=self._request.request_id, choice=self._choices.index(choice))
        with suppress(TwostrokeError):  # if it does not arrive, the worker computes something that nobody reads
            self._stub.StopChoice(message, timeout=_STOP_CHOICE_TIMEOUT_S)

    async def _wait_until_accepted(self, stream: LegStream) -> None:
        """Raises LegFailed if the worker is another than was placed on: one that was restarted may have other weights."""
        accepted = (await stream.read()).accepted
        if accepted.boot_id != self._placement.decode.boot_id:
            raise LegFailed("decode", self._placement.decode, Unavailable("it was restarted"), reached=False)

    async def _have_all_ended(self, stream: LegStream, reply: control_pb2.GenerateReply) -> bool:
        """With what this reply brings, which is passed on."""
        for tokens in reply.tokens:
            output = output_from_wire(self._request.request_id, tokens)
            if output.choice >= len(self._choices):
                raise stream.failed(Internal(f"choice {output.choice} of {len(self._choices)}"))
            try:
                await self._pass_on(self._choices[output.choice], output)
            except Internal as error:
                raise stream.failed(error) from None
        return all(choice.has_ended for choice in self._choices)


async def _first_reply(stream: LegStream, delivery: asyncio.Task[None] | None) -> Any:
    """The first tokens, or the prefill's failure, whichever comes first."""
    if delivery is None:
        return await stream.read()
    read = asyncio.create_task(stream.read())
    try:
        await asyncio.wait({read, delivery}, return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            await delivery  # raises if it failed; if it succeeded, the tokens are on their way
        return await read
    finally:
        await cancel_and_wait(read)
