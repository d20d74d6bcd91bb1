"""The registry of workers: soft state in Redis that workers renew and routers follow.

    worker   Registration   every second: entry with TTL + PUBLISH, in one script; between heartbeats, block events in batches
    router   FleetWatcher   subscribe ─> read all entries ─> follow the channels; connection lost: keep the view, start again

A worker's heartbeat carries everything, so a Redis that was flushed, replaced or restarted empty is whole again one heartbeat
after it is back. A router has a worker's entry as soon as it is published, and reads Redis only when it (re)connects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError

from shared.base.worker_info import WorkerId, WorkerInfo
from shared.index.block_publisher import BlockPublisher, BlockSource
from shared.index.connection import OPERATION_TIMEOUT_S, REDIS_ERRORS, Backoff, connect, describe
from shared.index.fleet_view import FleetView
from shared.index.keys import Keys
from shared.index.metrics import ERRORS
from shared.process.tasks import cancel_and_wait, start_essential

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
TTL_S = 5.0
FLUSH_S = 0.1
FIRST_RETRY_S = 0.1

# KEYS: entry, roster, blocks. ARGV: entry, TTL in ms, worker id, channel, marker. Returns whether the blocks have the marker.
_HEARTBEAT = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], now_ms + ARGV[2], ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return redis.call('SISMEMBER', KEYS[3], ARGV[5])
"""

# KEYS: entry, roster, blocks. ARGV: worker id, boot id, channel, goodbye. A newer boot's entry stays.
_GOODBYE = """
local is_json, entry = pcall(cjson.decode, redis.call('GET', KEYS[1]))
if is_json and entry.boot_id == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
redis.call('UNLINK', KEYS[3])
redis.call('PUBLISH', ARGV[3], ARGV[4])
"""


class Registration:
    """Keeps one worker known. While Redis is away it tries again, at least once per heartbeat, and never raises or blocks."""

    def __init__(
        self,
        redis_url: str,
        info: Callable[[], WorkerInfo],
        blocks: BlockSource,
        keys: Keys,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        ttl_s: float = TTL_S,
        flush_s: float = FLUSH_S,
    ) -> None:
        """`info` is called for each heartbeat; its ids must not change. Raises ConfigError for a malformed URL."""
        self._redis = connect(redis_url)
        self._keys = keys
        self._info = info
        self._blocks = blocks
        self._heartbeat_s = heartbeat_s
        self._flush_s = flush_s
        self._ttl_ms = round(ttl_s * 1000)
        self._backoff = Backoff(min(FIRST_RETRY_S, heartbeat_s), heartbeat_s)
        self._publisher: BlockPublisher | None = None
        self._turn = asyncio.Lock()
        self._next_heartbeat_at = 0.0
        self._is_failing = False
        self._is_stopping = False  # asyncio.wait_for may swallow a cancellation (Python < 3.12), and redis-py uses it
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns at once; a worker can serve before, and without, Redis."""
        info = self._info()
        self._publisher = BlockPublisher(self._redis, self._keys.blocks(info.worker_id, info.boot_id), self._blocks, self._ttl_ms)
        self._task = start_essential(self._run(self._publisher), "registration")

    async def publish(self) -> None:
        """A heartbeat now, because something changed that routers should know."""
        assert self._publisher is not None, "publish() before start()"
        self._next_heartbeat_at = 0.0
        await self._attempt(self._publisher)

    async def stop(self) -> None:
        """Says goodbye, so that routers need not wait for the TTL."""
        self._is_stopping = True
        await cancel_and_wait(self._task)
        info = self._info()
        keys = (self._keys.entry(info.worker_id), self._keys.roster, self._keys.blocks(info.worker_id, info.boot_id))
        goodbye = json.dumps({"worker_id": info.worker_id, "boot_id": info.boot_id})
        try:
            await self._redis.eval(_GOODBYE, len(keys), *keys, info.worker_id, info.boot_id, self._keys.goodbyes, goodbye)
        except REDIS_ERRORS as error:
            log.info("could not deregister, the entry will expire: %s", describe(error))
        await self._redis.aclose()

    async def _run(self, publisher: BlockPublisher) -> None:
        while not self._is_stopping:
            delay_s = await self._attempt(publisher)
            await asyncio.sleep(delay_s)

    async def _attempt(self, publisher: BlockPublisher) -> float:
        """One turn; returns the seconds until the next."""
        try:
            async with self._turn:
                if time.monotonic() >= self._next_heartbeat_at:
                    await self._heartbeat(publisher)
                await publisher.flush()
        except REDIS_ERRORS as error:
            return self._failed(error)
        if self._is_failing:
            log.info("registered again")
            self._is_failing = False
        self._backoff.reset()
        return self._flush_s

    async def _heartbeat(self, publisher: BlockPublisher) -> None:
        info = self._info()
        keys = (self._keys.entry(info.worker_id), self._keys.roster, publisher.key)
        values = (info.to_json(), self._ttl_ms, info.worker_id, self._keys.heartbeats, publisher.marker)
        if not await self._redis.eval(_HEARTBEAT, len(keys), *keys, *values):
            publisher.doubt()
        self._next_heartbeat_at = time.monotonic() + self._heartbeat_s

    def _failed(self, error: Exception) -> float:
        ERRORS.labels("publish").inc()
        self._next_heartbeat_at = 0.0  # Redis may have come back empty
        if not self._is_failing:
            log.warning("cannot register with Redis, trying again: %s", describe(error))
        self._is_failing = True
        return self._backoff.next_delay_s()


class FleetWatcher:
    """Keeps a router's view of the workers current. While Redis is away, the view stays as it was."""

    def __init__(
        self,
        redis_url: str,
        keys: Keys,
        on_change: Callable[[WorkerId], None] = lambda worker_id: None,
        *,
        ttl_s: float = TTL_S,
    ) -> None:
        """`on_change` is called from the event loop with a worker's id after each heartbeat, and after the worker was dropped.
        Raises ConfigError for a malformed URL."""
        self._redis = connect(redis_url)
        self._keys = keys
        self._on_change = on_change
        self._ping_after_s = ttl_s / 5
        self._view = FleetView(ttl_s, max_silence_s=self._ping_after_s + OPERATION_TIMEOUT_S)
        self._backoff = Backoff(FIRST_RETRY_S, OPERATION_TIMEOUT_S)
        self._complained_of: set[str] = set()
        self._is_connected = False
        self._has_failed = False
        self._is_stopping = False  # as in Registration
        self._task: asyncio.Task[None] | None = None

    @property
    def workers(self) -> Mapping[WorkerId, WorkerInfo]:
        """By worker id, as last heard: a copy."""
        return dict(self._view.workers)

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

    async def _follow(self) -> None:
        """Subscribes before it reads, so that nothing falls between the two. Returns only when stopping."""
        async with self._redis.pubsub() as pubsub:
            channels = (self._keys.heartbeats, self._keys.goodbyes)
            await pubsub.subscribe(*channels)
            for _ in channels:
                await self._next_message(pubsub)  # the confirmations
            await self._read_all()
            self._is_connected = True
            self._backoff.reset()
            log.info("following the registry, %d workers", len(self._view.workers))
            while not self._is_stopping:
                self._apply(await self._next_message(pubsub))

    async def _next_message(self, pubsub: PubSub) -> dict[str, Any]:
        """The next thing Redis says. Asks for a sign of life when it is silent; raises if there is none."""
        message: dict[str, Any] | None = await pubsub.get_message(timeout=self._ping_after_s)
        if message is None:
            await pubsub.ping()
            message = await pubsub.get_message(timeout=OPERATION_TIMEOUT_S)
        if message is None:
            raise RedisConnectionError(f"silent for {self._ping_after_s + OPERATION_TIMEOUT_S:g} s")
        return message

    async def _read_all(self) -> None:
        worker_ids: list[bytes] = await self._redis.execute_command("ZRANGE", self._keys.roster, 0, -1)
        keys = [self._keys.entry(WorkerId(worker_id.decode())) for worker_id in worker_ids]
        entries: list[bytes | None] = await self._redis.execute_command("MGET", *keys) if keys else []
        for entry in entries:
            if entry is not None:  # else: expired, and the roster not yet swept
                self._update(entry)
        self._heard()

    def _apply(self, message: dict[str, Any]) -> None:
        if message["channel"] == self._keys.heartbeats.encode():
            self._update(message["data"])
        elif message["channel"] == self._keys.goodbyes.encode():
            self._say_goodbye(message["data"])
        self._heard()

    def _heard(self) -> None:
        for worker_id in self._view.heard(time.monotonic()):
            log.warning("worker %s has not been heard of for too long", worker_id)
            self._on_change(worker_id)

    def _update(self, entry: bytes) -> None:
        try:
            info = WorkerInfo.from_json(entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._complain(entry, error)
            return
        self._view.update(info, time.monotonic())
        self._on_change(info.worker_id)

    def _say_goodbye(self, goodbye: bytes) -> None:
        try:
            raw = json.loads(goodbye)
            worker_id, boot_id = raw["worker_id"], raw["boot_id"]
        except (ValueError, KeyError, TypeError) as error:
            self._complain(goodbye, error)
            return
        if self._view.say_goodbye(worker_id, boot_id):
            self._on_change(worker_id)

    def _complain(self, message: bytes, error: Exception) -> None:
        """One line for each kind of fault, not one for each heartbeat."""
        kind = f"{type(error).__name__}: {error}"
        if kind not in self._complained_of:
            self._complained_of.add(kind)
            log.warning("ignoring a registry entry of another version (%s): %.200r", kind, message)
