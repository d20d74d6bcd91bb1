"""Registry and prefix index against a real server that is killed, flushed, frozen and replaced."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from services.local.valkey import ValkeyAddress, ValkeyServer
from shared.base.errors import ConfigError
from shared.base.worker_info import Load, Role, WorkerInfo
from shared.index import fleet_view, prefix_index
from shared.index.block_publisher import BlockPublisher
from shared.index.connection import REDIS_ERRORS, connect
from shared.index.entries import write_worker
from shared.index.fleet_view import FleetView
from shared.index.keys import Keys
from shared.index.metrics import ERRORS, SNAPSHOTS
from shared.index.prefix_index import PrefixLookup
from shared.index.registration import Registration
from shared.index.watcher import FleetWatcher
from tests.support.eventually import eventually
from tests.support.valkey import TestValkey, valkey

__all__ = ["valkey"]  # a fixture

HEARTBEAT_S = 0.1
FLUSH_S = 0.02
TTL_S = 1.0
SEED = 20_240_601
KEYS = Keys()
BLOCKS = KEYS.blocks("w0", "boot-1")  # of a_worker()


def a_worker(worker_id: str = "w0", boot_id: str = "boot-1", **changes: object) -> WorkerInfo:
    info = WorkerInfo(worker_id, boot_id, Role.DECODE, f"{worker_id}:1", "m", "digest", 16, 1000, 4096, 8)
    return replace(info, **changes)  # type: ignore[arg-type]


def publisher_of(redis: Redis, info: WorkerInfo, cache: FakeCache) -> BlockPublisher:
    return BlockPublisher(redis, KEYS, info.worker_id, info.boot_id, cache, ttl_ms=60_000)


class FakeCache:
    """A block cache whose events cancel out, as the engine's do: what came and went between two drains is in neither list."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held: set[bytes] = set()
        self._reported: set[bytes] = set()

    def store(self, hashes: list[bytes]) -> None:
        self.held.update(hashes)

    def remove(self, hashes: list[bytes]) -> None:
        self.held.difference_update(hashes)

    def new_hashes(self, count: int) -> list[bytes]:
        return [self.rng.randbytes(16) for _ in range(count)]

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        events = list(self.held - self._reported), list(self._reported - self.held)
        self._reported = set(self.held)
        return events


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache(random.Random(SEED))


@pytest_asyncio.fixture
async def redis(valkey: TestValkey) -> AsyncIterator[Redis]:
    client = connect(valkey.url)
    yield client
    await client.aclose()


@asynccontextmanager
async def registered(
    valkey: TestValkey, info: WorkerInfo | Callable[[], WorkerInfo], cache: FakeCache
) -> AsyncIterator[Registration]:
    get_info = (lambda: info) if isinstance(info, WorkerInfo) else info
    registration = Registration(valkey.url, get_info, cache, KEYS, heartbeat_s=HEARTBEAT_S, ttl_s=TTL_S, flush_s=FLUSH_S)
    await registration.start()
    try:
        yield registration
    finally:
        await registration.stop()


@asynccontextmanager
async def watching(
    valkey: TestValkey, on_change: Callable[[str], None] = lambda _: None, ttl_s: float = TTL_S
) -> AsyncIterator[FleetWatcher]:
    watcher = FleetWatcher(valkey.url, KEYS, on_change, ttl_s=ttl_s)
    await watcher.start()
    try:
        yield watcher
    finally:
        await watcher.stop()


async def indexed(redis: Redis, info: WorkerInfo) -> set[bytes]:
    members = await redis.smembers(KEYS.blocks(info.worker_id, info.boot_id))
    return {m for m in members if len(m) == 16}


def converges(redis: Redis, info: WorkerInfo, cache: FakeCache) -> Callable[[], object]:
    async def is_equal() -> bool:
        return await indexed(redis, info) == cache.held

    return is_equal


# The registry


async def test_router_learns_of_workers_that_were_there_before_and_that_come_later(valkey: TestValkey, cache: FakeCache) -> None:
    early = a_worker(
        "early", source="org/model", revision="v1", transports=("shm", "grpc"), draining=True, load=Load(1, 2, 3, 4, 5, 6.5)
    )
    async with registered(valkey, early, cache), watching(valkey) as watcher:
        await eventually(lambda: "early" in watcher.workers)
        assert watcher.workers["early"] == early
        async with registered(valkey, a_worker("late"), cache):
            await eventually(lambda: set(watcher.workers) == {"early", "late"})
        assert watcher.is_connected
        assert watcher.age_s < TTL_S


async def test_heartbeats_carry_load_and_a_change_is_told_at_once(valkey: TestValkey, cache: FakeCache) -> None:
    load = Load(num_running=1)
    changes: asyncio.Queue[str] = asyncio.Queue()
    async with (
        watching(valkey, changes.put_nowait) as watcher,
        registered(valkey, lambda: a_worker(load=load), cache) as registration,
    ):
        await changes.get()
        load = Load(num_running=7)
        await registration.publish()
        await eventually(lambda: watcher.workers["w0"].load.num_running == 7)
        assert await changes.get() == "w0"


async def test_worker_that_stops_is_gone_at_once_with_all_its_keys(valkey: TestValkey, cache: FakeCache, redis: Redis) -> None:
    cache.store(cache.new_hashes(10))
    async with watching(valkey) as watcher:
        async with registered(valkey, a_worker(), cache):
            await eventually(lambda: "w0" in watcher.workers)
        stopped_at = time.monotonic()
        await eventually(lambda: not watcher.workers)
        assert time.monotonic() - stopped_at < TTL_S / 2
        assert await redis.keys("*") == []


async def test_worker_that_falls_silent_expires_with_all_its_keys(valkey: TestValkey, cache: FakeCache, redis: Redis) -> None:
    gone: asyncio.Queue[str] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(watching(valkey, gone.put_nowait))
        registration = await stack.enter_async_context(registered(valkey, a_worker(), cache))
        await eventually(lambda: "w0" in watcher.workers)
        assert registration._task is not None
        registration._task.cancel()  # as if the process had been killed
        await eventually(lambda: not watcher.workers)
        await eventually(lambda: _is_empty(redis))


async def _is_empty(redis: Redis) -> bool:
    return await redis.dbsize() == 0


async def test_new_boot_voids_the_old_one_and_its_late_goodbye_is_ignored(valkey: TestValkey, redis: Redis) -> None:
    rng = random.Random(SEED)
    old, new = a_worker(boot_id="old"), a_worker(boot_id="new")
    old_cache, new_cache = FakeCache(rng), FakeCache(rng)
    hashes = old_cache.new_hashes(4)
    old_cache.store(hashes)
    lookup = PrefixLookup(valkey.url, KEYS)
    async with watching(valkey) as watcher:
        async with registered(valkey, old, old_cache) as old_registration:
            await eventually(converges(redis, old, old_cache))
            assert await lookup.longest_prefix([old], hashes) == {"w0": 4}
            assert old_registration._task is not None
            old_registration._task.cancel()
            new_registration = Registration(valkey.url, lambda: new, new_cache, KEYS, heartbeat_s=HEARTBEAT_S, ttl_s=TTL_S)
            await new_registration.start()
            await eventually(lambda: watcher.workers["w0"].boot_id == "new")
            assert await lookup.longest_prefix([watcher.workers["w0"]], hashes) == {"w0": 0}
        assert await redis.exists(KEYS.entry("w0"))
        assert await redis.zscore(KEYS.roster, "w0") is not None
        assert watcher.workers["w0"].boot_id == "new"
        await new_registration.stop()
    await lookup.close()


async def test_namespaces_on_one_redis_do_not_see_each_other(valkey: TestValkey, redis: Redis) -> None:
    ours, theirs, rng = Keys("ours"), Keys("theirs"), random.Random(SEED)
    info, caches = a_worker(), {keys: FakeCache(rng) for keys in (ours, theirs)}
    async with AsyncExitStack() as stack:
        watchers = {keys: FleetWatcher(valkey.url, keys, ttl_s=TTL_S) for keys in caches}
        for keys, cache in caches.items():
            cache.store(cache.new_hashes(3))
            registration = Registration(valkey.url, lambda keys=keys: replace(info, model=keys.namespace), cache, keys)  # type: ignore[misc]
            await registration.start()
            stack.push_async_callback(registration.stop)
            await watchers[keys].start()
            stack.push_async_callback(watchers[keys].stop)
        for keys, watcher in watchers.items():
            await eventually(lambda watcher=watcher: bool(watcher.workers))
            assert watcher.workers["w0"].model == keys.namespace
            lookup = PrefixLookup(valkey.url, keys, deadline_s=5.0)
            for other, cache in caches.items():
                expected = {"w0": 3 if other is keys else 0}
                await eventually(lambda: _finds(lookup, info, sorted(cache.held), expected))  # noqa: B023
            await lookup.close()
        await redis.publish(theirs.goodbyes, json.dumps({"worker_id": info.worker_id, "boot_id": info.boot_id}))
        await eventually(lambda: not watchers[theirs].workers)
        assert "w0" in watchers[ours].workers
    assert await redis.keys("*") == []


async def _finds(lookup: PrefixLookup, info: WorkerInfo, hashes: list[bytes], expected: dict[str, int]) -> bool:
    return await lookup.longest_prefix([info], hashes) == expected


async def test_entries_of_another_version_are_ignored_with_one_line(
    valkey: TestValkey, cache: FakeCache, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shared.index.entries")
    odd = json.loads(write_worker(a_worker("odd"))) | {"role": "encode"}
    await redis.set(KEYS.entry("odd"), json.dumps(odd))
    await redis.zadd(KEYS.roster, {"odd": time.time() * 1000 + 60_000})
    async with watching(valkey) as watcher, registered(valkey, a_worker(), cache):
        await eventually(lambda: "w0" in watcher.workers)
        for _ in range(3):
            await redis.publish(KEYS.heartbeats, json.dumps(odd))
        await redis.publish(KEYS.goodbyes, "[]")
        newer = json.loads(write_worker(a_worker("newer"))) | {"field_of_tomorrow": 1}
        await redis.publish(KEYS.heartbeats, json.dumps(newer))
        await eventually(lambda: set(watcher.workers) == {"w0", "newer"})
    assert sum("encode" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("comes_back", ["flushed", "killed and restarted empty"])
async def test_lost_registry_heals_within_about_a_heartbeat_and_no_worker_is_dropped(
    valkey: TestValkey, cache: FakeCache, redis: Redis, comes_back: str
) -> None:
    cache.store(cache.new_hashes(100))
    info, seen = a_worker(), set()

    async with watching(valkey) as watcher, registered(valkey, info, cache):
        await eventually(converges(redis, info, cache))
        await eventually(lambda: "w0" in watcher.workers)
        watcher._on_change = lambda _: seen.add(frozenset(watcher.workers))
        if comes_back == "flushed":
            await redis.flushall()
        else:
            await valkey.kill()
            await valkey.start()
        back_at = time.monotonic()
        await eventually(converges(redis, info, cache))
        await eventually(lambda: _exists(redis, KEYS.entry("w0")))
        assert time.monotonic() - back_at < TTL_S
        await eventually(lambda: watcher.is_connected and bool(seen))
        assert seen == {frozenset({"w0"})}


async def _exists(redis: Redis, key: str) -> bool:
    return bool(await redis.exists(key))


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_view_stays_while_redis_is_away_longer_than_the_ttl(valkey: TestValkey, cache: FakeCache, fault: str) -> None:
    dropped: list[bool] = []
    async with watching(valkey) as watcher, registered(valkey, a_worker(), cache):
        await eventually(lambda: "w0" in watcher.workers)
        watcher._on_change = lambda _: dropped.append("w0" not in watcher.workers)
        if fault == "killed":
            await valkey.kill()
        else:
            valkey.freeze()
        await eventually(lambda: watcher.age_s > 1.5 * TTL_S)
        assert not watcher.is_connected
        assert "w0" in watcher.workers
        if fault == "killed":
            await valkey.start()
        else:
            valkey.thaw()
        dropped.clear()
        await eventually(lambda: watcher.is_connected and bool(dropped))
        assert not any(dropped)


async def test_worker_starts_and_stops_without_redis_and_registers_when_it_comes(
    valkey: TestValkey, cache: FakeCache, redis: Redis
) -> None:
    await valkey.kill()
    errors_before = ERRORS.labels("publish")._value.get()
    async with registered(valkey, a_worker(), cache) as registration:
        await registration.publish()  # fails, and does not raise
        assert ERRORS.labels("publish")._value.get() > errors_before
        await valkey.start()
        await eventually(lambda: _exists(redis, KEYS.entry("w0")))
        await valkey.kill()


def test_malformed_url_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError, match="--redis-url") as caught:
        connect("http://user:secret@host")
    assert "secret" not in str(caught.value)


# The view, with the time handed in


def test_view_drops_the_silent_only_while_redis_speaks() -> None:
    view = FleetView(ttl_s=5.0, max_silence_s=2.0, stale_after_s=1.6)
    view.update(a_worker("a"), now=0.0)
    view.update(a_worker("b"), now=0.0)
    assert view.heard(0.0) == []
    for now in (1.5, 3.0, 4.5):
        view.update(a_worker("b"), now)
        assert view.heard(now) == []
    assert view.heard(5.0) == ["a"]
    assert view.heard(60.0) == []  # a minute of silence proves nothing about b
    assert [view.heard(60.0 + s) for s in (1.0, 2.0, 3.0, 4.0, 5.0)] == [[], [], [], [], ["b"]]
    assert view.workers == {}


def test_worker_without_heartbeats_is_stale_long_before_it_is_dropped_and_fresh_again_with_the_next():
    view = FleetView(ttl_s=5.0, max_silence_s=1.3, stale_after_s=1.6)
    view.update(a_worker("stuck"), now=0.0)
    view.update(a_worker("lively"), now=0.0)
    view.heard(0.0)
    for now in (0.5, 1.0, 1.5):
        view.update(a_worker("lively"), now)
        view.heard(now)
        assert not view.is_stale("stuck")
    view.update(a_worker("lively"), 1.6)
    view.heard(1.6)
    assert (view.is_stale("stuck"), view.is_stale("lively"), view.num_stale) == (True, False, 1)
    assert "stuck" in view.workers
    view.update(a_worker("stuck"), 1.7)
    view.heard(1.7)
    assert (view.is_stale("stuck"), view.num_stale) == (False, 0)
    assert not view.is_stale("never seen")


def test_nobody_is_stale_because_redis_or_the_router_was_silent():
    view = FleetView(ttl_s=5.0, max_silence_s=1.3, stale_after_s=1.6)
    view.update(a_worker(), now=0.0)
    view.heard(0.0)
    assert not view.is_stale("w0")
    view.heard(60.0)  # the first word after a minute
    assert not view.is_stale("w0")
    view.heard(61.0)
    view.heard(61.6)
    assert view.is_stale("w0")


def test_view_has_a_bound_and_known_workers_are_still_heard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_view, "MAX_WORKERS", 2)
    view = FleetView(ttl_s=5.0, max_silence_s=2.0, stale_after_s=1.6)
    assert [view.update(a_worker(name), now=0.0) for name in ("a", "b", "c", "a")] == [True, True, False, True]
    assert set(view.workers) == {"a", "b"}


def test_goodbye_of_another_boot_is_ignored() -> None:
    view = FleetView(ttl_s=5.0, max_silence_s=2.0, stale_after_s=1.6)
    view.update(a_worker(boot_id="new"), now=0.0)
    assert not view.say_goodbye("w0", "old")
    assert not view.say_goodbye("never seen", "old")
    assert view.say_goodbye("w0", "new")


# The prefix index


async def test_lookup_counts_leading_blocks_for_thousands_of_blocks_and_many_workers(valkey: TestValkey, redis: Redis) -> None:
    rng = random.Random(SEED)
    hashes = [rng.randbytes(16) for _ in range(4000)]
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    workers = [a_worker(f"w{i}") for i in range(8)]
    lengths = [0, 1, 63, 64, 65, 2000, 3999, 4000]
    for worker, length in zip(workers, lengths, strict=True):
        cache = FakeCache(rng)
        cache.store(hashes[:length] + hashes[length + 1 :] + cache.new_hashes(500))  # a hole, then more that does not count
        await publisher_of(redis, worker, cache).flush()
        assert await indexed(redis, worker) == cache.held
    found = await lookup.longest_prefix(workers, hashes)
    assert found == {w.worker_id: n for w, n in zip(workers, lengths, strict=True)}
    assert await lookup.longest_prefix([*workers, a_worker("unknown")], hashes[:10]) == {
        "w0": 0,
        "w1": 1,
        **{f"w{i}": 10 for i in range(2, 8)},
        "unknown": 0,
    }
    assert await lookup.longest_prefix([], hashes) == {}
    assert await lookup.longest_prefix(workers, []) == {}
    await lookup.close()


async def test_lookup_work_is_bounded_and_those_cut_short_stay_equal(
    valkey: TestValkey, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_CHECKS", 1000)
    rng = random.Random(SEED)
    hashes = [rng.randbytes(16) for _ in range(900)]
    workers = [a_worker("w0"), a_worker("w1")]
    for worker in workers:
        cache = FakeCache(rng)
        cache.store(hashes)
        await publisher_of(redis, worker, cache).flush()
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    assert await lookup.longest_prefix(workers, hashes) == {"w0": 448, "w1": 448}
    assert await lookup.longest_prefix(workers[:1], hashes) == {"w0": 900}
    await lookup.close()


async def test_lookup_gives_up_within_its_deadline_when_redis_is_slow_and_heals(
    valkey: TestValkey, redis: Redis, cache: FakeCache
) -> None:
    hashes = cache.new_hashes(100)
    cache.store(hashes)
    info = a_worker()
    await publisher_of(redis, info, cache).flush()
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=0.5, retry_s=0.5)
    assert await lookup.longest_prefix([info], hashes) == {"w0": 100}
    errors_before = ERRORS.labels("lookup")._value.get()
    valkey.freeze()
    started_at = time.monotonic()
    assert await asyncio.gather(*(lookup.longest_prefix([info], hashes) for _ in range(40))) == [{}] * 40
    assert time.monotonic() - started_at < 1.0
    assert ERRORS.labels("lookup")._value.get() > errors_before
    started_at = time.monotonic()
    assert await lookup.longest_prefix([info], hashes) == {}
    assert time.monotonic() - started_at < 0.25  # given up at once, until it is time to try again
    valkey.thaw()

    async def has_healed() -> bool:
        return await lookup.longest_prefix([info], hashes) == {"w0": 100}

    await eventually(has_healed)
    await valkey.kill()
    assert await lookup.longest_prefix([info], hashes) == {}
    await lookup.close()


async def test_batches_follow_the_cache_without_snapshots(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    cache.store(cache.new_hashes(5000))
    publisher = publisher_of(redis, a_worker(), cache)
    await publisher.flush()
    snapshots_before = SNAPSHOTS._value.get()
    for _ in range(5):
        cache.store(cache.new_hashes(3000))
        cache.remove(cache.rng.sample(sorted(cache.held), 2500))
        await publisher.flush()
        assert {m for m in await redis.smembers(BLOCKS) if len(m) == 16} == cache.held
    cache.remove(list(cache.held))
    await publisher.flush()
    assert await redis.smembers(BLOCKS) == {publisher.marker}
    assert SNAPSHOTS._value.get() == snapshots_before


async def test_late_commands_of_a_lost_connection_cannot_make_a_wrong_set_look_right(
    valkey: TestValkey, redis: Redis, cache: FakeCache
) -> None:
    cache.store(cache.new_hashes(3))
    publisher = publisher_of(redis, a_worker(), cache)
    await publisher.flush()
    valkey.freeze()
    cache.store(cache.new_hashes(3))
    with pytest.raises(REDIS_ERRORS):
        await asyncio.wait_for(publisher.flush(), 0.05)  # sent, never acknowledged
    cache.remove(list(cache.held)[:2])
    valkey.thaw()
    await publisher.flush()
    assert {m for m in await redis.smembers(BLOCKS) if len(m) == 16} == cache.held
    assert await redis.sismember(BLOCKS, publisher.marker)


async def test_index_converges_under_random_events_and_faults(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    print("seed", SEED)
    rng, info = random.Random(SEED + 1), a_worker()
    key = KEYS.blocks(info.worker_id, info.boot_id)
    faults = [
        redis.flushall,
        lambda: redis.delete(key),
        lambda: redis.client_kill_filter(_type="normal", skipme=True),
    ]
    async with registered(valkey, info, cache):
        for _ in range(12):
            for _ in range(rng.randrange(1, 6)):
                cache.store(cache.new_hashes(rng.randrange(200)))
                cache.remove(rng.sample(sorted(cache.held), rng.randrange(len(cache.held) + 1) // 2))
                await asyncio.sleep(rng.uniform(0, FLUSH_S))  # not to synchronize: to let flushes fall anywhere
            await rng.choice(faults)()
        await eventually(converges(redis, info, cache))


async def test_index_of_a_worker_lives_as_long_as_its_heartbeat(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    cache.store(cache.new_hashes(2))
    info = a_worker()
    async with registered(valkey, info, cache):
        await eventually(converges(redis, info, cache))
        first_seen_at = time.monotonic()
        await eventually(lambda: time.monotonic() - first_seen_at > 1.2 * TTL_S)
        assert await indexed(redis, info) == cache.held
        assert 0 < await redis.pttl(KEYS.blocks(info.worker_id, info.boot_id)) <= TTL_S * 1000


# The embedded server


async def test_embedded_server_listens_on_tcp_persists_nothing_and_bounds_memory(unused_tcp_port: int) -> None:
    server = ValkeyServer(ValkeyAddress(port=unused_tcp_port))
    await server.start()
    client = connect(server.address.url)
    config = await client.config_get("*")
    assert (config["save"], config["appendonly"], config["maxmemory-policy"]) == ("", "no", "allkeys-lru")
    assert int(config["maxmemory"]) == 256 * 1024 * 1024
    with pytest.raises(ConfigError, match="in use"):
        await ValkeyServer(ValkeyAddress(port=unused_tcp_port)).start()
    await client.aclose()
    await server.stop()
    assert await server.wait() == 0


async def test_embedded_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ended at start: .*(No such file|opening Unix socket)"):
        await ValkeyServer(ValkeyAddress(unix_socket=tmp_path / "missing" / "socket")).start()
