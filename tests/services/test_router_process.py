"""A router in a process of its own, over a real Redis and a decode worker whose steps the test lets through or holds."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest

from shared.base.request import FinishReason, Output, Token
from shared.base.worker_info import Role
from shared.engine import engine
from shared.index.keys import Keys
from shared.index.registration import Registration
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.conversions import output_to_wire, request_from_wire
from shared.worker.worker import Front, Service
from tests.support.cluster import FakeWorker
from tests.support.eventually import eventually
from tests.support.parts import Part, free_ports, service_command
from tests.support.tiny_tokenizer import save_tiny_tokenizer
from tests.support.valkey import TestValkey, valkey

__all__ = ["valkey"]  # a fixture

BODY = {"model": "tiny", "prompt": "quick brown fox", "max_tokens": 100, "ignore_eos": True, "stream": True}


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
async def stack(tmp_path: Path, valkey: TestValkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr(engine, "_exit_stuck", lambda elapsed_s: None)  # tests hold steps for as long as they need
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


# Clients that never read

NUM_DEAF = 64
TIMEOUT_S = 4.0
TOKENS_AT_ONCE = 10


class EndlessDecode(control_pb2_grpc.DecodeServicer):
    """Says as much as is asked for, as fast as the router takes it."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id
        self.num_streams = 0

    async def Generate(self, message: control_pb2.GenerateRequest, context: object) -> AsyncIterator[control_pb2.GenerateReply]:
        self.num_streams += 1
        try:
            yield control_pb2.GenerateReply(accepted=control_pb2.Accepted(boot_id=self._boot_id))
            request = request_from_wire(message.request)
            sampling = request.sampling
            for start in range(0, sampling.max_tokens, TOKENS_AT_ONCE):
                end = min(start + TOKENS_AT_ONCE, sampling.max_tokens)
                top = tuple((60 + k, -1.0 - k) for k in range(sampling.num_logprobs or 0))
                tokens = tuple(Token(index, 60, -1.0 if top else None, top) for index in range(start, end))
                reason = FinishReason.LENGTH if end == sampling.max_tokens else None
                yield control_pb2.GenerateReply(tokens=[output_to_wire(Output(request.request_id, 0, tokens, reason))])
        finally:
            self.num_streams -= 1


@pytest.fixture
async def endless(tmp_path: Path, valkey: TestValkey) -> AsyncIterator[tuple[Stack, EndlessDecode]]:
    worker = FakeWorker(Role.COLOCATED, config=WorkerConfig(model="tiny"))
    decode = EndlessDecode(worker.worker.boot_id)
    await worker.start_with(Front([Service(control_pb2_grpc.add_DecodeServicer_to_server, decode, "twostroke.v1.Decode")]))
    info = replace(worker.info(), max_model_len=2_000_000)
    registration = Registration(valkey.url, lambda: info, worker.worker.engine, Keys())
    await registration.start()
    yield Stack(worker, save_tiny_tokenizer(tmp_path), valkey), decode
    await registration.stop()
    await worker.stop()


async def test_clients_that_never_read_give_all_back_at_the_deadline(endless: tuple[Stack, EndlessDecode]) -> None:
    stack, decode = endless
    router, client = stack.router("--request-timeout-s", str(TIMEOUT_S), "--max-concurrent-requests", str(NUM_DEAF))
    await router.start()

    async def metric(name: str) -> float:
        lines = (await client.get("/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).rpartition(" ")[2])

    async def is_full() -> bool:
        return await metric("twostroke_http_requests_in_flight") == NUM_DEAF

    async def is_served() -> bool:
        return (await client.post("/v1/completions", json=BODY | {"stream": False})).status_code == 200

    async def fill_with_deaf_clients() -> int:
        """The router's resident memory, in bytes, when it has given their places back."""
        num_stuck = await metric("twostroke_http_clients_stuck_total")
        connections = [deaf_client(client.base_url.port) for _ in range(NUM_DEAF)]
        await eventually(is_full)
        assert not await is_served()
        await eventually(is_served, TIMEOUT_S + 4)
        await eventually(lambda: decode.num_streams == 0)
        assert await metric("twostroke_http_requests_in_flight") == 0
        assert await metric("twostroke_http_clients_stuck_total") == num_stuck + NUM_DEAF
        for connection in connections:
            connection.close()
        return int(psutil.Process(router.pid).memory_info().rss)

    try:
        async with client:
            memory = await fill_with_deaf_clients()  # which the allocator keeps
            assert await fill_with_deaf_clients() < 1.1 * memory
    finally:
        await router.stop()


def deaf_client(port: int | None) -> socket.socket:
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1_000_000,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection
