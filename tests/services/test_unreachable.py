"""Workers that are listed but cannot be reached, or are leaving: a request waits for somebody who takes it."""

from __future__ import annotations

import asyncio

from services.router.dispatch import metrics as leg_metrics
from shared.base.errors import Unavailable
from shared.base.worker_info import Role
from tests.support.cluster import cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import expected_tokens


def num_failures(leg: str) -> float:
    return sum(
        sample.value
        for metric in leg_metrics.failovers.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["leg"] == leg
    )


async def test_workers_that_cannot_be_reached_use_up_no_attempts() -> None:
    async with cluster() as made:
        gone = await made.add(Role.DECODE)
        await made.remove(gone, forget=False)  # the registry still lists it, and hears from others
        asked, before = request(prompt_of(30)), num_failures("decode")
        running = asyncio.create_task(made.run(asked))
        await eventually(lambda: num_failures("decode") >= before + 6)
        made.watcher.workers.pop(gone.info().worker_id)
        await made.add(Role.DECODE)
        assert (await running)[0] == expected_tokens(asked.token_ids, 8)


async def test_nobody_reachable_within_the_wait_ends_the_request() -> None:
    async with cluster() as made:
        made.dispatcher._worker_wait_s = 0.1
        gone = await made.add(Role.DECODE)
        await made.remove(gone, forget=False)
        running = asyncio.create_task(made.run(request(prompt_of(30))))
        async with asyncio.timeout(5):
            await asyncio.wait({running})
        error = running.exception()
        assert isinstance(error, Unavailable)
        assert gone.info().address not in str(error)


async def test_prefill_that_fails_while_its_decode_worker_drains_fails_no_request() -> None:
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL)
        decode = await made.add(Role.DECODE)
        prefill.runner.gate.clear()
        asked = request(prompt_of(100))
        running = asyncio.create_task(made.run(asked))
        await eventually(lambda: prefill.worker.engine.load().num_running == 1)
        decode.worker.is_draining = True
        made.announce(decode)
        await made.add(Role.DECODE)
        prefill.runner.fail_next = RuntimeError("device lost")
        prefill.runner.gate.set()
        assert (await running)[0] == expected_tokens(asked.token_ids, 8)
