"""The registry against a Redis that strangers write to, that refuses to write, and workers that are stuck."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.index.entries import Goodbye, write_goodbye, write_worker
from shared.index.keys import Keys
from shared.index.metrics import ERRORS, IS_FOLLOWING, REFUSED, SNAPSHOTS, WRITES_REFUSED
from shared.index.prefix_index import PrefixLookup
from shared.index.recent_holders import MANY_WORKERS, MAX_HOLDERS, MAX_PROBES, boot_tag, probes
from tests.services.test_index import (
    KEYS,
    TTL_S,
    FakeCache,
    a_worker,
    cache,
    converges,
    indexed,
    publisher_of,
    redis,
    registered,
    watching,
)
from tests.support.eventually import eventually
from tests.support.valkey import TestValkey, valkey

__all__ = ["cache", "redis", "valkey"]  # fixtures

SEED = 20_261_201
VALID = json.loads(write_worker(a_worker("stranger")))


def anything(rng: random.Random, depth: int = 2) -> object:
    kinds: list[Callable[[], object]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice([0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**300]),
        lambda: rng.choice([0.0, -0.5, 1e308, 5e-324, float("nan"), float("inf")]),
        lambda: rng.choice(["", "x", "w0", "boot-1", "prefill", "a:1", "\x00", "ü" * 300]),
    ]
    if depth:
        kinds += [
            lambda: [anything(rng, depth - 1) for _ in range(rng.randrange(4))],
            lambda: {str(anything(rng, 0)): anything(rng, depth - 1) for _ in range(rng.randrange(4))},
            lambda: VALID | {rng.choice([*VALID, "more"]): anything(rng, depth - 1)},
        ]
    return rng.choice(kinds)()


def garbage(rng: random.Random) -> bytes:
    """Random JSON of every type, whole entries with one thing wrong, bytes that are no text, and cut-off text."""
    text = json.dumps(anything(rng)).encode()
    return rng.choice([text, text, text[: rng.randrange(len(text) + 1)], rng.randbytes(rng.randrange(40)), b"[" * 20_000])


async def write_garbage(redis: Redis, rng: random.Random, key: str) -> None:
    """A value of any type of Redis."""
    await redis.delete(key)
    blob = garbage(rng)
    await rng.choice(
        [
            lambda: redis.set(key, blob),
            lambda: redis.rpush(key, blob, blob),
            lambda: redis.sadd(key, blob),
            lambda: redis.hset(key, "field", blob),
            lambda: redis.zadd(key, {blob: rng.choice([-1.0, 0.0, 1e300, float("inf")]), b"\xff\xfe": 1e15}),
        ]
    )()


async def test_strangers_on_every_channel_and_key_change_nothing_for_the_workers_there_are(
    valkey: TestValkey, redis: Redis, cache: FakeCache
) -> None:
    print("seed", SEED)
    rng, info = random.Random(SEED), a_worker()
    hashes = cache.new_hashes(5)
    cache.store(hashes)
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    keys = [KEYS.roster, KEYS.entry(info.worker_id), KEYS.entry("stranger"), KEYS.blocks("w0", "boot-1"), KEYS.holders]
    async with registered(valkey, info, cache), watching(valkey) as watcher:
        await eventually(lambda: "w0" in watcher.workers)
        for _ in range(60):
            await redis.publish(rng.choice([KEYS.heartbeats, KEYS.goodbyes]), garbage(rng))
            await write_garbage(redis, rng, rng.choice(keys))
            await lookup.longest_prefix([info, a_worker("stranger")], hashes)
            assert await lookup.recent_holders(hashes) == []
        await redis.publish(KEYS.goodbyes, b'{"worker_id":[],"boot_id":""}')
        await eventually(lambda: _is_found(lookup, hashes))
        await eventually(lambda: converges(redis, info, cache)())
        assert "w0" in watcher.workers
        assert all(worker.max_num_seqs >= 1 for worker in watcher.workers.values())
        async with registered(valkey, a_worker("newcomer"), FakeCache(rng)):
            await eventually(lambda: "newcomer" in watcher.workers)
        async with watching(valkey) as second:  # reads whatever stands in Redis now
            await eventually(lambda: "w0" in second.workers)
    await lookup.close()


async def _is_found(lookup: PrefixLookup, hashes: list[bytes]) -> bool:
    return (await lookup.longest_prefix([a_worker()], hashes)) == {"w0": len(hashes)}


async def test_router_that_starts_amid_garbage_finds_the_workers(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    far = time.time() * 1000 + 60_000
    before = REFUSED.labels("entry")._value.get(), REFUSED.labels("roster")._value.get()
    await redis.set(KEYS.entry("w0"), write_worker(a_worker()))
    await redis.set(KEYS.entry("liar"), write_worker(a_worker("w0", boot_id="stolen")))
    await redis.set(KEYS.entry("huge"), b"x" * 100_000)
    await redis.rpush(KEYS.entry("list"), b"x")
    await redis.zadd(KEYS.roster, {"w0": far, "liar": far, "huge": far, "list": far, b"\xff": far, "expired": far})
    async with watching(valkey) as watcher:
        await eventually(lambda: watcher.is_connected)
        assert dict(watcher.workers) == {"w0": a_worker()}
    assert REFUSED.labels("entry")._value.get() == before[0] + 3
    assert REFUSED.labels("roster")._value.get() == before[1] + 1


async def test_roster_of_another_type_does_not_keep_the_router_from_hearing(valkey: TestValkey, redis: Redis) -> None:
    await redis.set(KEYS.roster, b"no sorted set")
    async with watching(valkey) as watcher:
        await eventually(lambda: watcher.is_connected)
        await redis.publish(KEYS.heartbeats, write_worker(a_worker()))
        await eventually(lambda: "w0" in watcher.workers)
        await redis.publish(KEYS.goodbyes, write_goodbye(Goodbye("w0", "boot-1")))
        await eventually(lambda: not watcher.workers)


async def test_spoilt_set_of_one_worker_does_not_hide_what_others_hold(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    hashes = cache.new_hashes(3)
    cache.store(hashes)
    await publisher_of(redis, a_worker(), cache).flush()
    await redis.set(KEYS.blocks("spoilt", "boot-1"), b"no set")
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    assert await lookup.longest_prefix([a_worker("spoilt"), a_worker()], hashes) == {"spoilt": 0, "w0": 3}
    await lookup.close()


# Redis that answers, and refuses to write


async def be_full(redis: Redis) -> None:
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("maxmemory", 1)


async def have_room(redis: Redis) -> None:
    await redis.config_set("maxmemory", 0)


async def be_a_replica(redis: Redis) -> None:
    await redis.execute_command("REPLICAOF", "127.0.0.1", "1")


async def be_the_primary(redis: Redis) -> None:
    await redis.execute_command("REPLICAOF", "NO", "ONE")


async def fail_to_save(redis: Redis) -> None:
    """Its process that saves is killed, as one is that finds no memory."""
    await redis.config_set("stop-writes-on-bgsave-error", "yes")
    await redis.config_set("save", "1000 1000")
    await redis.config_set("rdb-key-save-delay", 60_000_000)
    await redis.bgsave()
    kill_children((await redis.info("server"))["process_id"])
    await eventually(lambda: _has_failed_to_save(redis))


def kill_children(pid: int) -> None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)


async def _has_failed_to_save(redis: Redis) -> bool:
    return bool((await redis.info("persistence"))["rdb_last_bgsave_status"] == "err")


async def save_nothing(redis: Redis) -> None:
    await redis.config_set("save", "")


@pytest.mark.parametrize(
    ("refuse", "heal"),
    [(be_full, have_room), (be_a_replica, be_the_primary), (fail_to_save, save_nothing)],
    ids=["full", "read-only", "disk fails"],
)
async def test_redis_that_refuses_writes_is_as_good_as_one_that_was_away(
    valkey: TestValkey, redis: Redis, cache: FakeCache, refuse: Callable, heal: Callable
) -> None:
    cache.store(cache.new_hashes(10))
    info, running, dropped = a_worker(), 0, []
    async with (
        watching(valkey) as watcher,
        registered(valkey, lambda: replace(info, load=replace(info.load, num_running=running)), cache),
    ):
        await eventually(lambda: converges(redis, info, cache)())
        await eventually(lambda: "w0" in watcher.workers)
        assert WRITES_REFUSED._value.get() == 0
        errors_before = ERRORS.labels("write")._value.get()
        watcher._on_change = lambda worker_id: dropped.append(worker_id) if worker_id not in watcher.workers else None
        await refuse(redis)
        with pytest.raises(ResponseError):
            await redis.set("proof", "x")
        refused_at = time.monotonic()
        running = 5
        await eventually(lambda: watcher.workers["w0"].load.num_running == 5)  # routers hear the load still
        await eventually(lambda: time.monotonic() - refused_at > 1.5 * TTL_S)
        assert watcher.is_connected
        assert IS_FOLLOWING._value.get() == 1
        assert not watcher.is_stale("w0")
        assert dropped == []
        assert WRITES_REFUSED._value.get() == 1
        assert 0 < ERRORS.labels("write")._value.get() - errors_before < 30  # once a heartbeat
        async with watching(valkey) as newcomer:  # a router that starts now hears them too
            await eventually(lambda: "w0" in newcomer.workers)
        await heal(redis)
        await eventually(lambda: converges(redis, info, cache)())
        await eventually(lambda: WRITES_REFUSED._value.get() == 0)
        assert await redis.exists(KEYS.entry("w0"))


async def test_worker_that_stops_while_writes_are_refused_says_goodbye(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    async with watching(valkey) as watcher:
        async with registered(valkey, a_worker(), cache):
            await eventually(lambda: "w0" in watcher.workers)
            await be_a_replica(redis)
        await eventually(lambda: not watcher.workers)


# Stuck workers


async def test_worker_whose_loop_is_stuck_is_stale_within_two_seconds_and_another_is_not(valkey: TestValkey, redis: Redis) -> None:
    rng = random.Random(SEED)
    async with watching(valkey, ttl_s=60.0) as watcher, registered(valkey, a_worker("lively"), FakeCache(rng)):
        await eventually(lambda: "lively" in watcher.workers)
        await redis.publish(KEYS.heartbeats, write_worker(a_worker("stuck")))
        await eventually(lambda: "stuck" in watcher.workers)
        stuck_at = time.monotonic()
        assert not watcher.is_stale("stuck")
        await eventually(lambda: watcher.is_stale("stuck"))
        assert time.monotonic() - stuck_at < 2.0
        assert set(watcher.workers) == {"lively", "stuck"}
        assert not watcher.is_stale("lively")


async def test_the_only_worker_is_noticed_too_though_nothing_else_is_to_be_heard(valkey: TestValkey, redis: Redis) -> None:
    async with watching(valkey, ttl_s=60.0) as watcher:
        await eventually(lambda: watcher.is_connected)
        await redis.publish(KEYS.heartbeats, write_worker(a_worker()))
        await eventually(lambda: "w0" in watcher.workers)
        stuck_at = time.monotonic()
        await eventually(lambda: watcher.is_stale("w0"))
        assert 1.0 < time.monotonic() - stuck_at < 2.0


# What keeps alive, and what heals


async def test_heartbeats_renew_a_set_without_any_new_snapshot(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    cache.store(cache.new_hashes(2))
    info = a_worker()
    async with registered(valkey, info, cache):
        await eventually(lambda: converges(redis, info, cache)())
        snapshots, first_seen_at = SNAPSHOTS._value.get(), time.monotonic()
        await eventually(lambda: time.monotonic() - first_seen_at > 1.2 * TTL_S)
        assert await indexed(redis, info) == cache.held
        assert SNAPSHOTS._value.get() == snapshots


async def test_one_good_lookup_makes_a_failing_index_healthy(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    hashes = cache.new_hashes(3)
    cache.store(hashes)
    await publisher_of(redis, a_worker(), cache).flush()
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=0.5, retry_s=0.5)
    valkey.freeze()
    assert await lookup.longest_prefix([a_worker()], hashes) == {}
    valkey.thaw()
    await eventually(lambda: _is_found(lookup, hashes))
    for _ in range(20):  # at once, not one in each retry_s
        assert await lookup.longest_prefix([a_worker()], hashes) == {"w0": 3}
    await lookup.close()


# Who stored a block last, in large fleets


async def test_recent_holders_are_known_from_the_moment_the_fleet_is_large(valkey: TestValkey, redis: Redis) -> None:
    rng = random.Random(SEED)
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    hashes = [rng.randbytes(16) for _ in range(200)]
    holders = [a_worker(name, boot_id=f"boot-{name}") for name in "abc"]
    for info, length in zip(holders, (50, 100, 150), strict=True):
        held = FakeCache(rng)
        held.store(hashes[:length])
        publisher = publisher_of(redis, info, held)
        publisher.see_fleet(MANY_WORKERS)
        await publisher.flush()
        assert await lookup.recent_holders(hashes) == ([] if info is holders[0] else await lookup.recent_holders(hashes))
        publisher.see_fleet(MANY_WORKERS + 1)
        await publisher.flush()
        assert (await lookup.recent_holders(hashes))[0] == boot_tag(info.boot_id)
        held.store(more := held.new_hashes(3))
        await publisher.flush()
        assert await lookup.recent_holders(more) == [boot_tag(info.boot_id)]
        assert await indexed(redis, info) == held.held
    assert await lookup.recent_holders([rng.randbytes(16) for _ in range(200)]) == []
    assert await lookup.recent_holders([]) == []
    assert await redis.strlen(KEYS.holders) <= 32 * 1024**2
    await lookup.close()


def test_probes_are_few_begin_with_the_last_block_and_span_the_prompt() -> None:
    assert probes([]) == []
    for length in (1, 2, MAX_PROBES, MAX_PROBES + 1, 1000, 4000):
        hashes = [number.to_bytes(16, "big") for number in range(length)]
        asked = [int.from_bytes(h, "big") for h in probes(hashes)]
        assert asked[0] == length - 1
        assert asked == sorted(set(asked), reverse=True)
        assert len(asked) <= MAX_PROBES
        assert asked[-1] < max(1, length / MAX_PROBES * 2)
    assert MAX_HOLDERS < MAX_PROBES


async def test_a_heartbeat_tells_the_publisher_how_large_the_fleet_is(valkey: TestValkey, redis: Redis, cache: FakeCache) -> None:
    hashes = cache.new_hashes(4)
    cache.store(hashes)
    far = time.time() * 1000 + 60_000
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    async with registered(valkey, a_worker(), cache):
        await eventually(lambda: converges(redis, a_worker(), cache)())
        assert not await redis.exists(KEYS.holders)
        await redis.zadd(KEYS.roster, {f"w{i}": far for i in range(MANY_WORKERS + 1)})

        async def is_known() -> bool:
            return await lookup.recent_holders(hashes) == [boot_tag("boot-1")]

        await eventually(is_known)
        assert 0 < await redis.pttl(KEYS.holders) <= TTL_S * 1000
    await lookup.close()


def test_keys_of_one_namespace() -> None:
    keys = Keys("blue")
    assert [keys.roster, keys.holders, keys.heartbeats, keys.goodbyes, keys.entry("w"), keys.blocks("w", "b")] == [
        f"twostroke:blue:{name}" for name in ("roster", "holders", "heartbeats", "goodbyes", "worker:w", "blocks:w:b")
    ]
