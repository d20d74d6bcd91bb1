"""The workers as this router sees them: who is alive, who may be used, and what this router has just sent them.

Workers that failed lately are used only when no other can serve (`rests.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from services.router.dispatch.model_pool import ModelPool, model_pools
from services.router.dispatch.placement import Placement, place
from services.router.dispatch.rests import Rests
from shared.base.block_hash import block_hashes, hash_seed
from shared.base.errors import InvalidRequest, TwostrokeError, Unavailable
from shared.base.request import Request
from shared.base.worker_info import BootId, Role, WorkerId, WorkerInfo
from shared.index.prefix_index import PrefixLookup
from shared.index.registry import FleetWatcher
from shared.wire.channels import Channels

_FADING_PER_HEARTBEAT = 0.98


class Fleet:
    def __init__(self, watcher: FleetWatcher, prefixes: PrefixLookup, channels: Channels, always_hand_off: bool = False) -> None:
        self._watcher = watcher
        self._prefixes = prefixes
        self._channels = channels
        self._always_hand_off = always_hand_off
        self._rests = Rests()
        self._boots: dict[WorkerId, BootId] = {}  # as last seen
        self._sent: Counter[WorkerId] = Counter()  # worker id -> requests sent since its last heartbeat
        self._transfer_s: dict[WorkerId, float] = {}  # prefill worker id -> moving average
        self._changed = asyncio.Event()
        self._joins = asyncio.Event()

    def notify_change(self, worker_id: WorkerId) -> None:
        """A worker appeared, went, or reported its load, which now includes what was sent before."""
        self._sent.pop(worker_id, None)
        if worker_id not in self._watcher.workers:
            self._transfer_s.pop(worker_id, None)
        elif worker_id in self._transfer_s:  # a slow one is tried again some day, although it is not used meanwhile
            self._transfer_s[worker_id] *= _FADING_PER_HEARTBEAT
        self._notice_boot(worker_id)
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Until a worker appears, goes, or reports."""
        self._changed.clear()
        await self._changed.wait()

    def next_to_join(self) -> asyncio.Event:
        """Set when a worker joins that was not there, or was restarted. Heartbeats do not count."""
        return self._joins

    def live(self) -> list[WorkerInfo]:
        """All that take requests, of all models."""
        return [w for w in self._watcher.workers.values() if not w.draining]

    def models(self) -> Mapping[str, ModelPool]:
        """By served name, what can be served now."""
        return model_pools(self.live())

    def channel(self, worker: WorkerInfo) -> Any:
        return self._channels.get(worker.address)

    async def place(
        self,
        request: Request,
        exclude: Collection[BootId] = (),
        *,
        digest: str | None = None,
        decode: WorkerInfo | None = None,
    ) -> Placement:
        """Where the request should run: among the workers of its model. Raises Unavailable if none of them can serve it, and
        InvalidRequest if it names no model and there are several.

        exclude: starts of workers that must not be used
        digest: of the weights that the request began with, which every worker that continues it must have
        decode: the worker that must decode; only the prefill worker is chosen
        """
        workers = [w for w in self._workers_of(request.model) if digest is None or w.digest == digest]
        if decode is not None:
            workers = [w for w in workers if w.boot_id == decode.boot_id or (w.role is Role.PREFILL and w.digest == decode.digest)]
        if not workers and digest is not None:
            raise Unavailable("no worker with the weights that this request began with is registered")
        excluded = {w.worker_id for w in workers if w.boot_id in exclude}
        rested = [w for w in workers if not self._rests.is_resting(w)]
        cached = await self._cached_blocks(request, workers)
        try:
            placement = self._place(request, rested, cached, excluded)
        except Unavailable:
            placement = self._place(request, workers, cached, excluded)
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self._sent[worker.worker_id] += 1
        return placement

    def _workers_of(self, model: str) -> list[WorkerInfo]:
        """A request without a model goes to the only one."""
        live = self.live()
        names = {w.model for w in live}
        if model:
            workers = [w for w in live if w.model == model]
            if not workers:
                raise Unavailable(f"no worker of model {model!r} is registered")
            return workers
        if len(names) > 1:
            raise InvalidRequest(f"model is missing; it must be one of {', '.join(sorted(names))}", param="model")
        return live

    def _place(
        self, request: Request, workers: Collection[WorkerInfo], cached: Mapping[WorkerId, int], excluded: Collection[WorkerId]
    ) -> Placement:
        return place(
            len(request.token_ids),
            workers,
            cached,
            self._sent,
            exclude=excluded,
            tie_breaker=request.request_id,
            always_hand_off=self._always_hand_off,
            transfer_s=self._transfer_s,
        )

    def observe_transfer(self, prefill: WorkerInfo, seconds: float) -> None:
        """How long a prompt's last blocks and its commit took after it was computed."""
        before = self._transfer_s.get(prefill.worker_id, seconds)
        self._transfer_s[prefill.worker_id] = 0.8 * before + 0.2 * seconds

    def failed(self, worker: WorkerInfo, error: TwostrokeError) -> None:
        self._rests.failed(worker, error)

    def succeeded(self, worker: WorkerInfo) -> None:
        self._rests.succeeded(worker)

    def _notice_boot(self, worker_id: WorkerId) -> None:
        worker, before = self._watcher.workers.get(worker_id), self._boots.pop(worker_id, None)
        if worker is not None:
            self._boots[worker_id] = worker.boot_id
        if before is not None and (worker is None or worker.boot_id != before):
            self._rests.forget(before)
        if worker is not None and worker.boot_id != before:
            self._joins.set()
            self._joins = asyncio.Event()

    async def _cached_blocks(self, request: Request, workers: Collection[WorkerInfo]) -> dict[WorkerId, int]:
        """Leading blocks of the prompt that each worker holds, as far as the index knows. One lookup per kind of worker."""
        kinds: dict[tuple[str, int], list[WorkerInfo]] = {}
        for worker in workers:
            kinds.setdefault((worker.digest, worker.block_size), []).append(worker)
        cached: dict[WorkerId, int] = {}
        for (digest, block_size), group in kinds.items():
            hashes = block_hashes(hash_seed(digest, request.cache_salt), request.token_ids, block_size)
            if hashes:
                cached |= await self._prefixes.longest_prefix(group, hashes)
        return cached


def can_pair(prefill: WorkerInfo, decode: WorkerInfo) -> bool:
    """Whether blocks can move from one to the other."""
    return prefill.role is Role.PREFILL and decode.role is Role.DECODE and prefill.digest == decode.digest
