"""A worker's side of the registry: soft state in Redis that it renews, and says goodbye to at the end.

    every second     PUBLISH the entry, then write it with a TTL: routers hear a worker even if Redis refuses every write
    in between       what changed in the cache, in batches (`block_publisher.py`)

A heartbeat carries everything, so a Redis that was flushed, replaced or restarted empty is whole again one heartbeat after it is
back. Heartbeats come from the event loop that serves requests: a loop that is stuck falls silent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum

from redis.exceptions import ResponseError

from shared.base.worker_info import WorkerInfo
from shared.index.block_publisher import BlockPublisher, BlockSource
from shared.index.connection import FIRST_RETRY_S, REDIS_ERRORS, TTL_S, Backoff, connect, describe
from shared.index.entries import Goodbye, write_goodbye, write_worker
from shared.index.keys import Keys
from shared.index.metrics import ERRORS, WRITES_REFUSED
from shared.process.tasks import cancel_and_wait, start_essential

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
FLUSH_S = 0.1

# KEYS: entry, roster, blocks, holders. ARGV: entry, TTL in ms, worker id, marker.
# Returns whether the blocks have the marker, and the number of workers. A key of another type was written by others: it goes.
_HEARTBEAT = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local roster_type = redis.call('TYPE', KEYS[2]).ok
if roster_type ~= 'zset' and roster_type ~= 'none' then redis.call('UNLINK', KEYS[2]) end
redis.call('ZADD', KEYS[2], now_ms + ARGV[2], ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('PEXPIRE', KEYS[4], ARGV[2])
return {redis.pcall('SISMEMBER', KEYS[3], ARGV[4]) == 1 and 1 or 0, redis.call('ZCARD', KEYS[2])}
"""

# KEYS: entry, roster, blocks. ARGV: worker id, boot id. A newer boot's entry stays.
_GOODBYE = """
local entry = redis.pcall('GET', KEYS[1])
local is_json, value = pcall(cjson.decode, entry)
if is_json and type(value) == 'table' and value.boot_id == ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
redis.call('UNLINK', KEYS[3])
"""


class _State(Enum):
    NEW = "new"
    WRITTEN = "written"
    REFUSED = "refused"  # Redis answers, and routers hear the heartbeats, but it does not write
    AWAY = "away"


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
        self._state = _State.NEW
        self._is_stopping = False  # asyncio.wait_for may swallow a cancellation (Python < 3.12), and redis-py uses it
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns at once; a worker can serve before, and without, Redis."""
        info = self._info()
        self._publisher = BlockPublisher(self._redis, self._keys, info.worker_id, info.boot_id, self._blocks, self._ttl_ms)
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
        goodbye = write_goodbye(Goodbye(info.worker_id, info.boot_id))
        try:
            await self._redis.publish(self._keys.goodbyes, goodbye)
            await self._redis.eval(_GOODBYE, len(keys), *keys, info.worker_id, info.boot_id)
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
                is_due = time.monotonic() >= self._next_heartbeat_at
                if is_due:
                    await self._heartbeat(publisher)
                if is_due or self._state is not _State.REFUSED:
                    await publisher.flush()
                    self._enter(_State.WRITTEN)
        except ResponseError as error:
            self._refused(error)
        except REDIS_ERRORS as error:
            return self._lost(error)
        self._backoff.reset()
        return min(self._flush_s, max(0.0, self._next_heartbeat_at - time.monotonic()))

    async def _heartbeat(self, publisher: BlockPublisher) -> None:
        """Tells the routers first. Raises what the Redis client raises for the writing that comes second."""
        info = self._info()
        entry = write_worker(info)
        self._next_heartbeat_at = time.monotonic() + self._heartbeat_s
        keys = (self._keys.entry(info.worker_id), self._keys.roster, publisher.key, self._keys.holders)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.publish(self._keys.heartbeats, entry)
            pipeline.eval(_HEARTBEAT, len(keys), *keys, entry, self._ttl_ms, info.worker_id, publisher.marker)
            published, written = await pipeline.execute(raise_on_error=False)
        for answer in (published, written):
            if isinstance(answer, Exception):
                publisher.doubt()
                raise answer
        has_marker, num_workers = written
        if not has_marker:
            publisher.doubt()
        publisher.see_fleet(num_workers)

    def _lost(self, error: Exception) -> float:
        ERRORS.labels("publish").inc()
        self._next_heartbeat_at = 0.0  # Redis may come back empty
        if self._enter(_State.AWAY):
            log.warning("cannot reach Redis, trying again: %s", describe(error))
        return self._backoff.next_delay_s()

    def _refused(self, error: Exception) -> None:
        """Tried again with the next heartbeat."""
        ERRORS.labels("write").inc()
        if self._enter(_State.REFUSED):
            log.warning("Redis refuses to write, routers hear heartbeats but find no prefixes: %s", describe(error))

    def _enter(self, state: _State) -> bool:
        """True if the state is another one than before."""
        before, self._state = self._state, state
        WRITES_REFUSED.set(state is _State.REFUSED)
        if state is _State.WRITTEN and before in (_State.REFUSED, _State.AWAY):
            log.info("registered again")
        return state is not before
