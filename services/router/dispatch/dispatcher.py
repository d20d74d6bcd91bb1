"""The router's backend: starts generations on the fleet, and knows whether one would succeed.

Ready means proven: a decode worker that is alive now has served a canary, a two-token request, with its prompt handed over by a
prefill worker (a colocated worker: by itself). Each worker is proven once per boot, when it first has a partner.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from services.router.dispatch.attempt import Attempt
from services.router.dispatch.budget import Budget
from services.router.dispatch.choices import Choice
from services.router.dispatch.fleet import Fleet, can_pair
from services.router.dispatch.generation import FleetGeneration
from services.router.dispatch.legs import LegFailed
from services.router.dispatch.placement import Placement
from shared.base.errors import TwostrokeError, Unavailable
from shared.base.request import Output, Request, SamplingParams
from shared.base.worker_info import BootId, Role
from shared.process.tasks import cancel_and_wait, start_essential

log = logging.getLogger(__name__)

_CANARY_TOKENS = (1, 2, 3)
_CANARY_DEADLINE_S = 20.0


class Dispatcher:
    def __init__(self, fleet: Fleet, worker_wait_s: float) -> None:
        self._fleet = fleet
        self._worker_wait_s = worker_wait_s
        self._proven: set[BootId] = set()  # boot ids of decode workers that have served a canary
        self._canaries: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._last_max_model_len: int | None = None

    async def start(self) -> None:
        self._canaries = start_essential(self._prove_newcomers(), "canaries")

    async def stop(self) -> None:
        await cancel_and_wait(self._canaries)

    def generate(self, request: Request, deadline_s: float) -> FleetGeneration:
        return FleetGeneration(self._fleet, request, deadline_s, self._worker_wait_s)

    def is_ready(self) -> str | None:
        """None if a request would succeed, else why not."""
        live = self._fleet.live()
        if any(w.boot_id in self._proven for w in live):
            return None
        if not any(w.role.can_decode for w in live):
            return "no decode worker is registered"
        if not any(w.role is Role.COLOCATED or any(can_pair(p, w) for p in live) for w in live):
            return (
                "no prefill worker is registered that agrees with a decode worker: compare their --model, --revision, --dtype, "
                "--kv-cache-dtype and --block-size"
            )
        return "no worker has served its first request yet"

    async def wait_ready(self) -> None:
        """Returns once the first canary has been served."""
        await self._ready.wait()

    @property
    def max_model_len(self) -> int:
        """The longest sequence that every usable worker takes; while there is none, what the last ones took, so that a request can
        wait for one."""
        lengths = [w.max_model_len for w in self._fleet.live()]
        if lengths:
            self._last_max_model_len = min(lengths)
        if self._last_max_model_len is None:
            raise Unavailable("no worker is registered")
        return self._last_max_model_len

    async def _prove_newcomers(self) -> None:
        while True:
            for placement in self._unproven():
                try:
                    await self._send_canary(placement)
                    self._proven.add(placement.decode.boot_id)
                    self._ready.set()
                except (TwostrokeError, LegFailed, TimeoutError) as error:
                    log.warning("canary to %s failed: %s", placement.decode.worker_id, error)
            self._proven &= {w.boot_id for w in self._fleet.live()}
            await self._fleet.wait_for_change()

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
        )
        choice = Choice(request, 0)

        async def take(_: Choice, output: Output) -> None:
            choice.accept(output)

        async with asyncio.timeout(_CANARY_DEADLINE_S):
            await Attempt(self._fleet, request, [choice], placement, Budget(_CANARY_DEADLINE_S), take).run()
