"""A router in a process of its own, over a real Redis and a decode worker whose steps the test lets through or holds."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from shared.base.worker_info import Role
from shared.index.keys import Keys
from shared.index.registration import Registration
from shared.options.worker import WorkerConfig
from tests.support.cluster import FakeWorker
from tests.support.eventually import eventually
from tests.support.parts import Part, free_ports, service_command
from tests.support.tiny_tokenizer import save_tiny_tokenizer
from tests.support.valkey import TestValkey, valkey

__all__ = ["valkey"]  # a fixture

BODY = {"model": "tiny", "prompt": "quick brown fox", "max_tokens": 100, "stream": True}


class Turnstile(threading.Event):
    """Lets some steps through, and the others when it is set."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps

    def wait(self, timeout: float | None = None) -> bool:
        self._num_steps -= 1
        return self._num_steps >= 0 or super().wait(timeout)


@dataclass
class Stack:
    worker: FakeWorker
    folder: Path
    valkey: TestValkey

    def router(self, *flags: str) -> tuple[Part, httpx.AsyncClient]:
        (port,) = free_ports(1)
        options = ("--model", str(self.folder), "--served-model-name", "tiny", "--port", str(port), "--redis-url", self.valkey.url)
        part = Part("router", (*service_command("router"), *options, *flags), os.environ, self.folder / "router.log")
        return part, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)

    def hold_after(self, num_steps: int) -> None:
        self.worker.runner.gate = Turnstile(num_steps)

    def go_on(self) -> None:
        self.worker.runner.gate.set()


@pytest.fixture
async def stack(tmp_path: Path, valkey: TestValkey) -> AsyncIterator[Stack]:
    worker = await FakeWorker(Role.COLOCATED, config=WorkerConfig(model="tiny", max_model_len=200)).start()
    registration = Registration(valkey.url, worker.info, worker.worker.engine, Keys())
    await registration.start()
    yield Stack(worker, save_tiny_tokenizer(tmp_path), valkey)
    worker.runner.gate.set()
    await registration.stop()
    await worker.stop()


async def test_a_router_that_drains_refuses_what_is_new_and_finishes_what_runs(stack: Stack) -> None:
    router, client = stack.router("--drain-timeout-s", "60")
    await router.start()
    stack.hold_after(5)
    try:
        async with client, client.stream("POST", "/v1/completions", json=BODY) as stream:
            events = stream.aiter_lines()
            await anext(events)
            router.signal(signal.SIGTERM)

            async def is_draining() -> bool:
                return (await client.get("/ready")).status_code == 503

            await eventually(is_draining)
            refused = await client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "stops" in refused.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 200
            stack.go_on()
            rest = [line async for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert await router.wait() == 0
    finally:
        await router.stop()


@pytest.mark.parametrize("again", [False, True])
async def test_what_still_runs_when_the_time_is_up_or_at_a_second_signal_ends_with_an_error_event(
    stack: Stack, again: bool
) -> None:
    router, client = stack.router("--drain-timeout-s", "60" if again else "0.1")
    await router.start()
    stack.hold_after(5)
    try:
        async with client, client.stream("POST", "/v1/completions", json=BODY) as stream:
            events = stream.aiter_lines()
            await anext(events)
            router.signal(signal.SIGTERM)
            if again:
                router.signal(signal.SIGINT)
            rest = [line async for line in events if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
        assert await router.wait() == 0
        stack.go_on()
        await eventually(stack.worker.is_idle)
    finally:
        await router.stop()
