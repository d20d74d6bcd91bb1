"""The fleet over a real registry and a real prefix index: what is heard and what is looked up meet in one choice."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import replace

from services.router.dispatch.fleet import Fleet
from shared.base.block_hash import block_hashes, hash_seed
from shared.base.errors import Unavailable
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import Load, Role
from shared.index.prefix_index import PrefixLookup
from shared.index.watcher import FleetWatcher
from tests.services.test_index import KEYS, FakeCache, a_worker, registered
from tests.support.eventually import eventually
from tests.support.valkey import TestValkey, valkey

__all__ = ["valkey"]  # a fixture

IDLE = Load(num_free_blocks=1000, prefill_tokens_per_s=1000.0)


def a_request(number: int, salt: str = "") -> Request:
    return Request(f"r{number}", tuple(range(1000)), 1000, SamplingParams(), cache_salt=salt, model="m")


async def test_heartbeats_rests_and_salted_prefixes_decide_together(valkey: TestValkey) -> None:
    a, b = (a_worker(name, f"boot-{name}", role=Role.COLOCATED, load=IDLE) for name in "ab")
    caches = {name: FakeCache(random.Random(name)) for name in "ab"}
    caches["b"].store(block_hashes(hash_seed("digest", "tenant"), range(1000), 16))
    lookup = PrefixLookup(valkey.url, KEYS, deadline_s=5.0)
    watcher = FleetWatcher(valkey.url, KEYS, lambda worker_id: fleet.notify_change(worker_id))
    fleet = Fleet(watcher, lookup, None, always_hand_off=False)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(lookup.close)
        await watcher.start()
        stack.push_async_callback(watcher.stop)
        running = 0
        await stack.enter_async_context(
            registered(valkey, lambda: replace(a, load=replace(IDLE, num_running=running)), caches["a"])
        )
        await stack.enter_async_context(registered(valkey, b, caches["b"]))

        async def chosen(salt: str) -> str:
            return (await fleet.place(a_request(0, salt))).decode.worker_id

        async def is_b_found() -> bool:
            return await lookup.longest_prefix([b], hashes) == {"b": len(hashes)}

        hashes = block_hashes(hash_seed("digest", "tenant"), range(1000), 16)
        await eventually(lambda: set(watcher.workers) == {"a", "b"})
        await eventually(is_b_found)
        await eventually(lambda: not fleet._sent)
        assert await chosen("tenant") == "b"  # it has the prompt, under this tenant's salt
        await eventually(lambda: not fleet._sent)  # a heartbeat has cleared what was sent
        fleet.failed(b, Unavailable("gone"))
        assert await chosen("tenant") == "a"
        fleet.succeeded(b)
        await eventually(lambda: not fleet._sent)
        assert await chosen("tenant") == "b"
        running = 8
        await eventually(lambda: watcher.workers["a"].load.num_running == 8 and not fleet._sent)
        assert await chosen("another tenant") == "b"
