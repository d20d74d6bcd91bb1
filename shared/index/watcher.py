"""A router's side of the registry: who is there, kept current while Redis is, and as last known while it is not.

    subscribe ─> read all entries ─> follow the channels; connection lost: keep the view, start again

A router has a worker's entry as soon as it is published, and reads Redis only when it (re)connects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from shared.base.worker_info import WorkerId, WorkerInfo
from shared.index.connection import FIRST_RETRY_S, OPERATION_TIMEOUT_S, REDIS_ERRORS, TTL_S, Backoff, connect, describe
from shared.index.entries import MAX_ENTRY_BYTES, InvalidEntry, Refusals, Source, read_goodbye, read_worker, read_worker_id
from shared.index.fleet_view import MAX_WORKERS, FleetView
from shared.index.keys import Keys
from shared.index.metrics import ERRORS, IS_FOLLOWING, NUM_STALE
from shared.process.tasks import cancel_and_wait, start_essential

log = logging.getLogger(__name__)

# A stuck worker is noticed after these two at the latest: less than 2 s. Heartbeats come every second.
STALE_AFTER_S = 1.6
PING_AFTER_S = 0.3
# Waking up costs more than a heartbeat does, so those of a large fleet are read a few at a time: a burst, then a pause.
_BURST_S = 0.001
_PAUSE_S = 0.02
_ENTRIES_PER_READ = 256


class FleetWatcher:
    """Keeps a router's view of the workers current. While Redis is away, the view stays as it was."""

    def __init__(
        self,
        redis_url: str,
        keys: Keys,
        on_change: Callable[[WorkerId], None] = lambda worker_id: None,
        *,
        ttl_s: float = TTL_S,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        """`on_change` is called from the event loop with a worker's id after each heartbeat, and after the worker was dropped.
        Raises ConfigError for a malformed URL."""
        self._redis = connect(redis_url)
        self._keys = keys
        self._on_change = on_change
        self._view = FleetView(ttl_s, max_silence_s=PING_AFTER_S + OPERATION_TIMEOUT_S, stale_after_s=stale_after_s)
        # By worker id, as last heard. A view that changes while its reader awaits.
        self.workers: Mapping[WorkerId, WorkerInfo] = MappingProxyType(self._view.workers)
        self._backoff = Backoff(FIRST_RETRY_S, OPERATION_TIMEOUT_S)
        self._refusals = Refusals()
        self._is_connected = False
        self._has_failed = False
        self._is_stopping = False  # asyncio.wait_for may swallow a cancellation (Python < 3.12), and redis-py uses it
        self._task: asyncio.Task[None] | None = None

    def is_stale(self, worker_id: WorkerId) -> bool:
        """Whether the worker's heartbeats are overdue, though its entry has not expired."""
        return self._view.is_stale(worker_id)

    @property
    def is_connected(self) -> bool:
        """False: `workers` is what was last known."""
        return self._is_connected

    @property
    def age_s(self) -> float:
        """Seconds since Redis was last heard from; infinite before the first time."""
        return time.monotonic() - self._view.last_heard_at

    async def start(self) -> None:
        """Returns at once; `on_change` tells when workers are known."""
        IS_FOLLOWING.set(0)
        NUM_STALE.set_function(lambda: self._view.num_stale)
        self._task = start_essential(self._run(), "fleet-watcher")

    async def stop(self) -> None:
        self._is_stopping = True
        await cancel_and_wait(self._task)
        await self._redis.aclose()

    async def _run(self) -> None:
        while not self._is_stopping:
            try:
                await self._follow()
            except REDIS_ERRORS as error:
                self._failed(error)
            await asyncio.sleep(self._backoff.next_delay_s())

    def _failed(self, error: Exception) -> None:
        ERRORS.labels("watch").inc()
        if self._is_connected or not self._has_failed:
            log.warning("lost sight of Redis, keeping %d workers as last known: %s", len(self._view.workers), describe(error))
        self._is_connected = False
        self._has_failed = True
        IS_FOLLOWING.set(0)

    async def _follow(self) -> None:
        """Subscribes before it reads, so that nothing falls between the two. Returns only when stopping."""
        async with self._redis.pubsub() as pubsub:
            channels = (self._keys.heartbeats, self._keys.goodbyes)
            await pubsub.subscribe(*channels)
            for _ in channels:
                await self._next_message(pubsub)  # the confirmations
            await self._read_all()
            self._is_connected = True
            IS_FOLLOWING.set(1)
            self._backoff.reset()
            log.info("following the registry, %d workers", len(self._view.workers))
            pause_at = float("-inf")
            while not self._is_stopping:
                self._apply(await self._next_message(pubsub))
                if time.monotonic() >= pause_at:
                    await asyncio.sleep(_PAUSE_S)
                    pause_at = time.monotonic() + _BURST_S

    async def _next_message(self, pubsub: PubSub) -> dict[str, Any]:
        """The next thing Redis says. Asks for a sign of life when it is silent; raises if there is none."""
        message: dict[str, Any] | None = await pubsub.get_message(timeout=PING_AFTER_S)
        if message is None:
            await pubsub.ping()
            try:
                message = await pubsub.get_message(timeout=OPERATION_TIMEOUT_S)
            except ResponseError:  # a Redis that cannot write to its disk refuses even this, and lives
                message = {"type": "pong"}
        if message is None:
            raise RedisConnectionError(f"silent for {PING_AFTER_S + OPERATION_TIMEOUT_S:g} s")
        return message

    async def _read_all(self) -> None:
        worker_ids = await self._read_roster()
        for start in range(0, len(worker_ids), _ENTRIES_PER_READ):
            some_ids = worker_ids[start : start + _ENTRIES_PER_READ]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for worker_id in some_ids:
                    pipeline.getrange(self._keys.entry(worker_id), 0, MAX_ENTRY_BYTES)
                entries = await pipeline.execute(raise_on_error=False)
            for worker_id, entry in zip(some_ids, entries, strict=True):
                if entry != b"":  # else: expired, and the roster not yet swept
                    self._update("entry", entry, worker_id)
        self._heard()

    async def _read_roster(self) -> list[WorkerId]:
        worker_ids = []
        try:
            members = await self._redis.execute_command("ZRANGE", self._keys.roster, 0, MAX_WORKERS - 1)
        except ResponseError as error:
            self._refusals.add("roster", InvalidEntry("roster", str(error), "a sorted set"))
            return []
        for member in members:
            try:
                worker_ids.append(read_worker_id(member))
            except InvalidEntry as refused:
                self._refusals.add("roster", refused)
        return worker_ids

    def _apply(self, message: dict[str, Any]) -> None:
        if message["type"] == "message":
            if message["channel"] == self._keys.heartbeats.encode():
                self._update("heartbeat", message["data"])
            else:
                self._say_goodbye(message["data"])
        self._heard()

    def _heard(self) -> None:
        for worker_id in self._view.heard(time.monotonic()):
            log.warning("worker %s has not been heard of for too long", worker_id)
            self._on_change(worker_id)

    def _update(self, source: Source, data: object, expected_id: WorkerId | None = None) -> None:
        try:
            info = read_worker(data)
            if expected_id not in (None, info.worker_id):
                raise InvalidEntry("worker_id", info.worker_id, "that of the entry's key")
            if not self._view.update(info, time.monotonic()):
                raise InvalidEntry("number of workers", MAX_WORKERS + 1, f"at most {MAX_WORKERS}")
        except InvalidEntry as refused:
            self._refusals.add(source, refused)
        else:
            self._on_change(info.worker_id)

    def _say_goodbye(self, data: object) -> None:
        try:
            goodbye = read_goodbye(data)
        except InvalidEntry as refused:
            self._refusals.add("goodbye", refused)
            return
        if self._view.say_goodbye(goodbye.worker_id, goodbye.boot_id):
            self._on_change(goodbye.worker_id)
