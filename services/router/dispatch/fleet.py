"""The workers as this router sees them: who is alive, who may be used, and what this router has just sent them.

Workers that failed lately are used only when no other can serve (`rests.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from services.router.dispatch.model_pool import ModelPool
from services.router.dispatch.placement import Placement, place
from services.router.dispatch.pools import Group, Members, Pools
from services.router.dispatch.rests import Rests
from shared.base.block_hash import block_hashes, hash_seed
from shared.base.errors import TwostrokeError, Unavailable
from shared.base.request import Request
from shared.base.worker_info import BootId, Role, WorkerId, WorkerInfo
from shared.index.prefix_index import PrefixLookup
from shared.index.watcher import FleetWatcher
from shared.wire.channels import Channels

_FADING_PER_HEARTBEAT = 0.98
_EXACT_UP_TO = 16  # workers of one phase and weights that are all looked at; of more, as many are drawn as come next
_NUM_DRAWN = 6  # the best of six at random is among the best eighth of all, more often than not


class Fleet:
    def __init__(self, watcher: FleetWatcher, prefixes: PrefixLookup, channels: Channels, always_hand_off: bool = False) -> None:
        self._watcher = watcher
        self._prefixes = prefixes
        self._channels = channels
        self._always_hand_off = always_hand_off
        self._rests = Rests()
        self._members: dict[WorkerId, tuple[BootId, bool]] = {}  # as last seen: which start, and whether it drains
        self._sent: Counter[WorkerId] = Counter()  # worker id -> requests sent since its last heartbeat
        self._transfer_s: dict[WorkerId, float] = {}  # prefill worker id -> moving average
        self._pools = Pools()
        self._members_changed = asyncio.Event()

    def notify_change(self, worker_id: WorkerId) -> None:
        """A worker appeared, went, or reported its load, which now includes what was sent before."""
        self._sent.pop(worker_id, None)
        if worker_id not in self._watcher.workers:
            self._transfer_s.pop(worker_id, None)
        elif worker_id in self._transfer_s:  # a slow one is tried again some day, although it is not used meanwhile
            self._transfer_s[worker_id] *= _FADING_PER_HEARTBEAT
        self._pools.see(worker_id, self._watcher.workers.get(worker_id))
        self._notice_members(worker_id)

    def next_change_of_members(self) -> asyncio.Event:
        """Set when a worker joins, is restarted, drains or goes. Heartbeats do not count. Ask before looking at the workers: then
        no change is missed."""
        return self._members_changed

    def live(self) -> list[WorkerInfo]:
        """All that take requests, of all models, and whose processes are seen to make progress."""
        return [w for w in self._watcher.workers.values() if not w.draining and not self._watcher.is_stale(w.worker_id)]

    def decoder_boots(self) -> set[BootId]:
        """Of all decode workers that do not drain, also of those whose heartbeats are overdue."""
        return {w.boot_id for w in self._watcher.workers.values() if w.role.can_decode and not w.draining}

    def models(self) -> Mapping[str, ModelPool]:
        """By served name, what can be served now."""
        return self._pools.models()

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
        groups = self._pools.groups(request.model, digest)
        candidates: list[WorkerInfo] = []
        cached: dict[WorkerId, int] = {}
        for group in groups:
            members, held = await self._look_into(group, request, exclude, decode)
            candidates += members
            cached |= held
        placement = self._first_possible(request, cached, exclude, self._by_preference(candidates, groups, decode))
        for worker in (placement.prefill, placement.decode):
            if worker is not None:
                self._sent[worker.worker_id] += 1
        return placement

    async def _look_into(
        self, group: Group, request: Request, exclude: Collection[BootId], decode: WorkerInfo | None
    ) -> tuple[list[WorkerInfo], dict[WorkerId, int]]:
        """The workers of a group that are worth a look, and how many leading blocks of the prompt each holds, as far as is known:
        all of a small group, and of a large one some at random and those that stored the prompt's blocks last."""
        ids = self._some_of(group.prefills, request, exclude)
        ids += [decode.worker_id] if decode is not None else self._some_of(group.decoders, request, exclude)
        hashes = self._hashes(group, request)
        if decode is None and len(ids) < len(group):
            holders = map(self._pools.with_tag, await self._prefixes.recent_holders(hashes))
            members = set(ids)
            ids += [h for h in holders if h is not None and h not in members and any(self._infos([h], group.digest))]
        workers = list(self._infos(ids, group.digest))
        return workers, await self._prefixes.longest_prefix(workers, hashes) if hashes else {}

    def _some_of(self, members: Members, request: Request, exclude: Collection[BootId]) -> list[WorkerId]:
        if len(members) <= _EXACT_UP_TO:
            return list(members)

        def is_good(worker_id: WorkerId) -> bool:
            worker = self._watcher.workers.get(worker_id)
            return worker is not None and worker.boot_id not in exclude and self._is_preferred(worker)

        return members.draw(_NUM_DRAWN, 2 * _NUM_DRAWN, request.request_id, is_good)

    def _hashes(self, group: Group, request: Request) -> list[bytes]:
        block_size = next((w.block_size for w in self._infos(group, group.digest)), 0)
        return block_hashes(hash_seed(group.digest, request.cache_salt), request.token_ids, block_size) if block_size else []

    def _by_preference(
        self, candidates: list[WorkerInfo], groups: Collection[Group], decode: WorkerInfo | None
    ) -> Iterator[list[WorkerInfo]]:
        """Candidates that neither rest nor are stale, then whoever does neither, then whoever is not stale, then everybody."""
        yield [w for w in candidates if self._is_preferred(w)]
        everybody = [w for group in groups for w in self._infos(group, group.digest)]
        if decode is not None:
            everybody = [w for w in everybody if w.role is Role.PREFILL or w.boot_id == decode.boot_id]
        if len(everybody) > len(candidates):
            yield [w for w in everybody if self._is_preferred(w)]
        yield [w for w in everybody if not self._watcher.is_stale(w.worker_id)]
        yield everybody

    def _first_possible(
        self,
        request: Request,
        cached: Mapping[WorkerId, int],
        exclude: Collection[BootId],
        choices: Iterator[list[WorkerInfo]],
    ) -> Placement:
        unavailable = Unavailable("no worker is registered")
        for workers in choices:
            try:
                excluded = {w.worker_id for w in workers if w.boot_id in exclude} if exclude else ()
                return self._place(request, workers, cached, excluded)
            except Unavailable as error:
                unavailable = error
        raise unavailable

    def _is_preferred(self, worker: WorkerInfo) -> bool:
        return not (self._rests.is_resting(worker) or self._watcher.is_stale(worker.worker_id))

    def _infos(self, worker_ids: Iterable[WorkerId], digest: str) -> Iterator[WorkerInfo]:
        """Of those that are still there, with these weights."""
        known = self._watcher.workers
        return (w for w in map(known.get, worker_ids) if w is not None and w.digest == digest)

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

    def _notice_members(self, worker_id: WorkerId) -> None:
        worker, before = self._watcher.workers.get(worker_id), self._members.pop(worker_id, None)
        now = None if worker is None else (worker.boot_id, worker.draining)
        if now is not None:
            self._members[worker_id] = now
        if before is not None and (now is None or now[0] != before[0]):
            self._rests.forget(before[0])
        if now != before:
            self._members_changed.set()
            self._members_changed = asyncio.Event()


def can_pair(prefill: WorkerInfo, decode: WorkerInfo) -> bool:
    """Whether blocks can move from one to the other."""
    is_pair = prefill.role is Role.PREFILL and decode.role is Role.DECODE
    return is_pair and (prefill.model, prefill.digest) == (decode.model, decode.digest)
