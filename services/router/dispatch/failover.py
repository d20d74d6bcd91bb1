"""A request's way over as many workers as it takes, until each of its outputs has ended.

    place ─> attempt ─> all of the turn have ended ─> the next turn, if there are more outputs than a worker has seats
     │          ├ prefill failed for good: the decode worker computes the prompt itself
     │          ├ decode failed before a token: the next worker
     │          └ decode failed later: the tokens so far become part of the prompt, and another pair goes on at the next index
     └ nobody can serve: wait, at growing intervals, or until workers come or go

Sampling depends on (seed, position) alone, so a continuation is what the first worker would have
produced. That holds for workers of one digest: the first token binds the request to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from services.router.dispatch.attempt import Attempt
from services.router.dispatch.budget import Budget
from services.router.dispatch.choices import Choice
from services.router.dispatch.client_errors import shown_to_client
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.legs import LegFailed, note_failure
from services.router.dispatch.placement import Placement
from services.router.dispatch.retries import Retries
from shared.base.errors import TwostrokeError, Unavailable
from shared.base.request import Output, Request, choice_seed

log = logging.getLogger(__name__)


class Failover:
    def __init__(
        self,
        fleet: Fleet,
        request: Request,
        choices: Sequence[Choice],
        budget: Budget,
        worker_wait_s: float,
        emit: Callable[[Output], Awaitable[None]],
    ) -> None:
        """`emit` takes each new output; while it waits, nothing more is read from the worker."""
        self._fleet = fleet
        self._request = request
        self._choices = choices
        self._budget = budget
        self._worker_wait_s = worker_wait_s
        self._emit = emit
        self._digest: str | None = None  # that the request is bound to
        self._num_attempts = 0
        self._attempts: set[Attempt] = set()  # under way

    async def run(self) -> None:
        """Raises the TwostrokeError that a client is told."""
        await self._serve(self._choices)

    def stop(self, choice: Choice) -> None:
        """Nobody reads more of `choice`."""
        had_ended = choice.has_ended
        choice.stop()
        if had_ended:
            return
        for attempt in self._attempts:
            attempt.stop(choice)

    async def _serve(self, choices: Sequence[Choice]) -> None:
        """Until all have ended. None has tokens of its own yet, or there is only one."""
        retries = Retries(self._budget, self._worker_wait_s)
        while choices := [choice for choice in choices if not choice.has_ended]:
            placement = await self._place(self._request_for(choices[:1]), retries)
            turn = _turn(choices, placement)
            num_before = len(turn[0].token_ids)
            try:
                await self._attempt(turn, placement)
            except LegFailed as failed:
                note_failure(self._fleet, failed)
                if all(len(choice.token_ids) == num_before for choice in turn):
                    await self._recover(failed, retries)
                    continue
                await self._continue([choice for choice in turn if not choice.has_ended])
            retries = Retries(self._budget, self._worker_wait_s)

    async def _continue(self, choices: Sequence[Choice]) -> None:
        """Each goes on alone. (If there is only one, it is alone already.)"""
        if len(choices) <= 1:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._serve([choice]))
        except* TwostrokeError as errors:
            raise errors.exceptions[0] from None

    async def _recover(self, failed: LegFailed, retries: Retries) -> None:
        """Returns when it is time for another attempt. Raises what the client is told if there will be none."""
        retries.note(failed)
        if retries.are_used_up:
            log.warning("request %s failed: %s", self._request.request_id, failed)
            raise shown_to_client(failed.error)
        if retries.must_pause:
            await _pause(self._fleet.next_change_of_members(), retries)

    async def _place(self, request: Request, retries: Retries) -> Placement:
        """Waits while nobody can serve. Raises Unavailable."""
        while True:
            changed = self._fleet.next_change_of_members()
            try:
                placement = await self._fleet.place(request, retries.exclude, digest=self._digest)
                return placement if retries.may_hand_off else Placement(prefill=None, decode=placement.decode)
            except Unavailable as error:
                if retries.is_time_up:
                    raise error from None
            retries.begin_round()
            await _pause(changed, retries)

    async def _attempt(self, turn: Sequence[Choice], placement: Placement) -> None:
        self._num_attempts += 1
        request = self._request_for(turn)
        request = replace(request, request_id=f"{request.request_id}-{self._num_attempts}")
        pass_on = partial(self._pass_on, placement.decode.digest, self._digest is None)
        attempt = Attempt(self._fleet, request, turn, placement, self._budget, pass_on)
        self._attempts.add(attempt)
        try:
            await attempt.run()
        finally:
            self._attempts.remove(attempt)

    async def _pass_on(self, digest: str, is_first_answer: bool, choice: Choice, output: Output) -> None:
        """A prefix hit of a later attempt is of tokens that this request itself may have left in a cache: not the client's."""
        new = choice.accept(output if is_first_answer else replace(output, num_cached_tokens=0))
        if new is not None:
            self._digest = digest
            await self._emit(new)

    def _request_for(self, turn: Sequence[Choice]) -> Request:
        """What a worker is asked for these choices: consecutive ones, or a single one with the tokens that it has."""
        sampling = self._request.sampling
        sampling = replace(sampling, n=len(turn), seed=choice_seed(sampling.seed, turn[0].index))
        return replace(self._request, token_ids=tuple(turn[0].token_ids), sampling=sampling)


def _turn(choices: Sequence[Choice], placement: Placement) -> Sequence[Choice]:
    """Those of `choices` that the placement can serve at once and as one request: a run of them, as many as there are seats."""
    first = choices[0]
    if first.has_tokens:
        return choices[:1]
    num_seats = min(worker.max_num_seqs for worker in (placement.decode, placement.prefill) if worker is not None)
    return [choice for i, choice in enumerate(choices[:num_seats]) if choice.index == first.index + i]


async def _pause(changed: asyncio.Event, retries: Retries) -> None:
    """Cut short by a worker that joins: it may be the one that can serve."""
    with suppress(TimeoutError):
        async with asyncio.timeout(retries.next_pause_s()):
            await changed.wait()
