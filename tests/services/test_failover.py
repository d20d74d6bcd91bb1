"""Workers fail in every phase of a request; the client sees the same tokens, in order, without gap or repeat."""

from __future__ import annotations

import asyncio

import pytest

from services.router.dispatch import dispatcher
from services.router.dispatch.placement import Placement
from shared.base.errors import InvalidRequest, Unavailable
from shared.base.request import Output
from shared.base.worker_info import Role
from shared.options.worker import WorkerConfig
from tests.support.cluster import Cluster, cluster, collect_tokens, prompt_of, request
from tests.support.fake_runner import expected_tokens


async def test_colocated_worker_serves_without_handoff() -> None:
    async with cluster() as made:
        await made.add(Role.COLOCATED)
        asked = request(prompt_of(70))
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)


async def test_decode_serves_alone_when_no_prefill_worker_is_there() -> None:
    async with cluster() as made:
        await made.add(Role.DECODE)
        asked = request(prompt_of(70))
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)


async def test_dead_prefill_worker_is_replaced_by_another() -> None:
    async with cluster() as made:
        dead = await made.add(Role.PREFILL)
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        await made.remove(dead, forget=False)  # the registry still lists it
        for start in range(4):
            asked = request(prompt_of(100, start))
            assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)


async def test_only_prefill_worker_dead_lets_decode_compute_the_prompt() -> None:
    async with cluster() as made:
        dead = await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        await made.remove(dead, forget=False)
        asked = request(prompt_of(100))
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)


async def test_prefill_step_that_fails_is_retried_elsewhere() -> None:
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL)
        decode = await made.add(Role.DECODE)
        prefill.runner.fail_next = RuntimeError("device lost")
        asked = request(prompt_of(100))
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
        prefill.check_baseline()
        await decode.worker.streams.wait_idle()
        decode.check_baseline()


async def kill_after(made: Cluster, num_tokens: int, asked: object) -> list[Output]:
    """Runs the request and stops the decode worker that serves it after so many tokens; a second one is there."""
    outputs: list[Output] = []
    generation = made.dispatcher.generate(asked, 20)  # type: ignore[arg-type]
    async for output in generation:
        outputs.append(output)
        if sum(len(o.tokens) for o in outputs) == num_tokens:
            serving = next(w for w in made.workers if w.worker.role is Role.DECODE and w.worker.engine.load().num_running)
            await made.remove(serving, forget=False)
    return outputs


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("seed", [0, 12345])
async def test_decode_worker_that_dies_while_streaming_is_continued_at_the_next_index(num_tokens: int, seed: int) -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        await made.add(Role.DECODE)
        asked = request(prompt_of(50), max_tokens=60, seed=seed)
        outputs = await kill_after(made, num_tokens, asked)
        assert collect_tokens(outputs, asked)[0] == expected_tokens(asked.token_ids, 60, seed=seed)


async def test_n_outputs_survive_the_death_of_their_decode_worker() -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        await made.add(Role.DECODE)
        asked = request(prompt_of(50), max_tokens=40, n=3, seed=9)
        outputs = await kill_after(made, 10, asked)
        tokens = collect_tokens(outputs, asked)
        assert tokens == {c: expected_tokens(asked.token_ids, 40, seed=9, choice=c) for c in range(3)}


async def test_request_waits_for_a_restarted_worker() -> None:
    async with cluster() as made:
        first = await made.add(Role.DECODE)
        await made.remove(first, forget=False)
        asked = request(prompt_of(30))
        running = asyncio.create_task(made.run(asked))
        replacement = await made.add(Role.DECODE)
        made.watcher.workers.pop(first.info().worker_id)
        made.announce(replacement)
        assert (await running)[0] == expected_tokens(asked.token_ids, 8)


async def test_nobody_to_serve_is_unavailable_within_the_wait() -> None:
    async with cluster() as made:
        made.dispatcher._worker_wait_s = 0.05
        with pytest.raises(Unavailable):
            await made.run(request(prompt_of(5)))


async def test_clients_mistake_is_not_retried_and_hurts_no_worker() -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        decode = await made.add(Role.DECODE)
        with pytest.raises(InvalidRequest, match="5000"):
            await made.run(request([5000]))
        assert decode.worker.engine.load().num_steps == 0


async def test_deadline_ends_a_request_that_hangs() -> None:
    async with cluster() as made:
        decode = await made.add(Role.DECODE)
        decode.runner.gate.clear()
        with pytest.raises(Exception, match="longer than"):
            await made.run(request(prompt_of(5)), deadline_s=0.3)


async def test_ready_only_after_a_pair_has_served_a_canary() -> None:
    async with cluster() as made:
        assert made.dispatcher.is_ready() == "no decode worker is registered"
        await made.add(Role.DECODE)
        assert "no prefill worker" in (made.dispatcher.is_ready() or "")
        await made.add(Role.PREFILL)
        assert "first request" in (made.dispatcher.is_ready() or "")
        await made.dispatcher.start()
        async with asyncio.timeout(5):
            await made.dispatcher.wait_ready()
        assert made.dispatcher.is_ready() is None


async def test_models_are_ready_and_bounded_each_for_itself() -> None:
    async with cluster() as made:
        with pytest.raises(Unavailable, match="'a'"):
            made.dispatcher.max_model_len("a")
        await made.dispatcher.start()
        change = asyncio.create_task(made.dispatcher.wait_for_change())
        await asyncio.sleep(0)
        worker = await made.add(Role.COLOCATED, config=WorkerConfig(model="models/a"))
        await made.add(Role.DECODE, config=WorkerConfig(model="models/b"))
        async with asyncio.timeout(5):
            await change
            await made.dispatcher.wait_ready("a")
        assert made.dispatcher.is_ready() is None
        assert "no prefill worker of model 'b'" in (made.dispatcher.is_ready("b") or "")
        assert made.dispatcher.is_ready("c") == "no decode worker of model 'c' is registered"
        assert {name: pool.source for name, pool in made.dispatcher.models().items()} == {"a": "models/a", "b": "models/b"}
        assert made.dispatcher.max_model_len("a") == worker.info().max_model_len
        with pytest.raises(Unavailable):
            made.dispatcher.max_model_len("")
        await made.remove(worker)
        assert list(made.dispatcher.models()) == ["b"]
        assert made.dispatcher.max_model_len("a") == worker.info().max_model_len  # so that a request can wait for its next worker


async def test_a_canary_that_fails_is_logged_once_and_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_CANARY_FIRST_RETRY_S", 0.01)
    num_tries = 0

    async def fail_four_times(self: dispatcher.Dispatcher, placement: Placement) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 5:
            raise Unavailable("cold")

    monkeypatch.setattr(dispatcher.Dispatcher, "_send_canary", fail_four_times)
    async with cluster() as made:
        worker = await made.add(Role.COLOCATED)
        await made.dispatcher.start()
        async with asyncio.timeout(5):
            await made.dispatcher.wait_ready()
        made.announce(worker)  # a heartbeat
        assert num_tries == 5
    assert [record.message for record in caplog.records if "canary" in record.message] == [
        f"canary to {worker.info().worker_id} failed: cold"
    ]
