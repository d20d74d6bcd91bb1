"""The short form: every kind of fault that needs no root, once, with the same streams and the same checks as the long one."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from shared.base.worker_info import Role
from tests.chaos import faults, strangers
from tests.chaos.faults import DrainWorker
from tests.chaos.load import Load, make_asks
from tests.chaos.run import Chaos
from tests.chaos.site import MODEL_NAME, Site, site

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The budget of keep-alive is two seconds; a machine that is busy adds to it.
HUNG_PEER_S = 2.0
BUSY_MACHINE_S = 2.0
PAUSE_S = 0.5  # between a stream's requests: leaves the processor to processes that start again


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("chaos"), random.Random(0)) as made:
        yield made


async def test_chaos_loses_no_token_repeats_none_and_leaves_nothing_behind(running: Site) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    kinds = [
        kind for kind in (*faults.EVERYWHERE, *strangers.EVERYWHERE) if kind is not DrainWorker
    ]  # which another test does to every worker
    chaos = Chaos(running, seed, num_asks=12, pause_s=PAUSE_S)
    report = await chaos.run(kinds, num_faults=len(kinds), num_requests=100, num_lanes=3)
    assert not report.violations
    assert report.num_exact >= 100
    assert report.num_faults == len(kinds)


async def test_stopped_decode_worker_is_noticed_within_two_seconds_and_its_stream_goes_on(running: Site) -> None:
    body = {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 400, "temperature": 0, "stream": True}
    text, frozen, longest_gap_s = "", None, 0.0
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        whole = await client.post("/v1/completions", json={**body, "stream": False})
        last = time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                now = time.monotonic()
                longest_gap_s, last = max(longest_gap_s, now - last), now
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if frozen is None and text:
                    frozen = next(iter([w for w in running.of_role(Role.DECODE) if (await w.status()).num_running]))
                    frozen.part.signal(signal.SIGSTOP)
                    last = time.monotonic()
    assert frozen is not None
    frozen.part.signal(signal.SIGCONT)
    assert text == whole.json()["choices"][0]["text"]
    assert longest_gap_s < HUNG_PEER_S + BUSY_MACHINE_S


async def test_restarting_every_worker_in_turn_fails_no_request(running: Site) -> None:
    rng = random.Random(1)
    load, enough = Load(running, make_asks(rng, 8), rng, PAUSE_S), asyncio.Event()
    await load.learn()
    asking = asyncio.create_task(load.run(enough, num_streams=4))
    for worker in running.workers:
        await worker.part.stop()
        assert await worker.part.wait() == 0
        await worker.part.start()
    enough.set()
    await asking
    await load.close()
    assert not load.tally.violations
    assert load.tally.num_exact > 0


async def test_requests_go_on_while_redis_is_gone(running: Site) -> None:
    rng = random.Random(2)
    load = Load(running, make_asks(rng, 8), rng)
    await load.learn()
    await running.valkey.kill()
    await load.once()
    await running.valkey.start()
    await load.close()
    assert not load.tally.violations
