"""The router's backend: starts generations on the fleet, and knows whether one would succeed.

Ready means proven: a decode worker that is alive now has served a canary, a two-token request, with its prompt handed over by a
prefill worker (a colocated worker: by itself). Each worker is proven once per boot, when it first has a partner.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress

from services.router.dispatch.attempt import Attempt
from services.router.dispatch.budget import Budget
from services.router.dispatch.choices import Choice
from services.router.dispatch.fleet import Fleet, can_pair
from services.router.dispatch.generation import FleetGeneration
from services.router.dispatch.legs import LegFailed
from services.router.dispatch.model_pool import ModelPool
from services.router.dispatch.placement import Placement
from shared.base.errors import TwostrokeError, Unavailable
from shared.base.request import Output, Request, SamplingParams
from shared.base.worker_info import BootId, Role
from shared.index.connection import Backoff
from shared.process.tasks import cancel_and_wait, start_essential

log = logging.getLogger(__name__)

_CANARY_TOKENS = (1, 2, 3)
_CANARY_DEADLINE_S = 20.0
_CANARY_FIRST_RETRY_S, _CANARY_MOST_RETRY_S = 0.5, 8.0
_MAX_CANARIES = 16  # at once
_MAX_REMEMBERED = 256  # models


class Dispatcher:
    def __init__(self, fleet: Fleet, worker_wait_s: float) -> None:
        self._fleet = fleet
        self._worker_wait_s = worker_wait_s
        self._proven: set[BootId] = set()  # boot ids of decode workers that have served a canary
        self._canaries: asyncio.Task[None] | None = None
        self._proved = asyncio.Event()  # a canary was served
        self._failing: set[BootId] = set()  # of those that have not
        self._last_max_model_len: dict[str, int] = {}  # by model

    async def start(self) -> None:
        self._canaries = start_essential(self._prove_newcomers(), "canaries")

    async def stop(self) -> None:
        await cancel_and_wait(self._canaries)

    def generate(self, request: Request, deadline_s: float) -> FleetGeneration:
        return FleetGeneration(self._fleet, request, deadline_s, self._worker_wait_s)

    def is_ready(self, model: str = "") -> str | None:
        """None if a request for the model (empty: for any) would succeed, else why not."""
        live = [w for w in self._fleet.live() if not model or w.model == model]
        of_model = f" of model {model!r}" if model else ""
        if any(w.boot_id in self._proven for w in live):
            return None
        if not any(w.role.can_decode for w in live):
            return f"no decode worker{of_model} is registered"
        if not any(w.role is Role.COLOCATED or any(can_pair(p, w) for p in live) for w in live):
            return (
                f"no prefill worker{of_model} is registered that agrees with a decode worker: compare their --model, --revision, "
                "--dtype, --kv-cache-dtype and --block-size"
            )
        return f"no worker{of_model} has served its first request yet"

    async def wait_ready(self, model: str = "") -> None:
        """Returns when a decode worker of the model (empty: of any) has served a canary."""
        while self.is_ready(model) is not None:
            await self._proved.wait()

    def models(self) -> Mapping[str, ModelPool]:
        return self._fleet.models()

    def max_model_len(self, model: str) -> int:
        """Longest sequence that every worker of the model takes; while there is none, what the last ones took, so that a request
        can wait for one. `model` may be empty if there is only one. Raises Unavailable."""
        pools = self.models()
        pool = pools.get(model) or (next(iter(pools.values())) if not model and len(pools) == 1 else None)
        if pool is not None:
            self._remember(pool)
        length = self._last_max_model_len.get(model if pool is None else pool.name)
        if length is None:
            raise Unavailable(f"no worker of model {model!r} is registered" if model else "no worker is registered")
        return length

    async def wait_for_change(self) -> None:
        """Until a worker joins, drains or goes: `models` may be others then."""
        await self._fleet.next_change_of_members().wait()

    def _remember(self, pool: ModelPool) -> None:
        self._last_max_model_len.pop(pool.name, None)
        self._last_max_model_len[pool.name] = pool.max_model_len
        if len(self._last_max_model_len) > _MAX_REMEMBERED:
            del self._last_max_model_len[next(iter(self._last_max_model_len))]

    async def _prove_newcomers(self) -> None:
        backoff = Backoff(_CANARY_FIRST_RETRY_S, _CANARY_MOST_RETRY_S)
        while True:
            changed = self._fleet.next_change_of_members()
            turns = asyncio.Semaphore(_MAX_CANARIES)
            await asyncio.gather(*(self._prove(placement, turns) for placement in self._unproven()))
            known = self._fleet.decoder_boots()
            self._proven &= known
            self._failing &= known
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._proven == known else backoff.next_delay_s()):
                    await changed.wait()
                    backoff.reset()

    async def _prove(self, placement: Placement, turns: asyncio.Semaphore) -> None:
        boot_id, worker_id = placement.decode.boot_id, placement.decode.worker_id
        try:
            async with turns:
                await self._send_canary(placement)
        except (TwostrokeError, LegFailed, TimeoutError) as error:
            if boot_id not in self._failing:  # one line, however often it is tried again
                log.warning("canary to %s failed: %s", worker_id, error or type(error).__name__)
            self._failing.add(boot_id)
            return
        self._failing.discard(boot_id)
        self._proven.add(boot_id)
        self._proved.set()
        self._proved = asyncio.Event()

    def _unproven(self) -> list[Placement]:
        """One placement for each decode worker that has not served a canary and could."""
        live = self._fleet.live()
        placements = []
        for decode in live:
            if not decode.role.can_decode or decode.boot_id in self._proven:
                continue
            partner = next((p for p in live if can_pair(p, decode)), None)
            if partner is not None or decode.role is Role.COLOCATED:
                placements.append(Placement(prefill=partner, decode=decode))
        return placements

    async def _send_canary(self, placement: Placement) -> None:
        request = Request(
            request_id=f"canary-{secrets.token_hex(8)}",
            token_ids=_CANARY_TOKENS,
            num_prompt_tokens=len(_CANARY_TOKENS),
            sampling=SamplingParams(max_tokens=2, temperature=0.0),
            model=placement.decode.model,
        )
        choice = Choice(request, 0)

        async def take(_: Choice, output: Output) -> None:
            choice.accept(output)

        async with asyncio.timeout(_CANARY_DEADLINE_S):
            await Attempt(self._fleet, request, [choice], placement, Budget(_CANARY_DEADLINE_S), take).run()
