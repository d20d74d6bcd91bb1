"""The one-command stack with the real model and the official client: 64 streams at once, and every process killed in turn."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import httpx
import openai
import psutil
import pytest
import pytest_asyncio
import redis
from transformers import AutoTokenizer

from shared.index.entries import read_worker
from shared.index.keys import Keys
from shared.models.fetch import fetch_default_model
from shared.options.peers import PeerConfig
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.channels import Channels
from tests.support.eventually import eventually
from tests.support.stack import Stack, stack
from tests.support.text import prompts_of

SEED = 64
NUM_STREAMS = 64


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_default_model(print)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Stack]:
    with stack(folder, "--dtype", "float32", "--kv-cache-memory", "512MiB", "--handoff", "always") as made:
        yield made


@pytest_asyncio.fixture
async def client(running: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=280, max_retries=0) as made:
        yield made


def model_of(running: Stack) -> str:
    return str(httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"])


async def test_chat_answers_a_question_streamed_and_not(running: Stack, client: openai.AsyncOpenAI) -> None:
    ask = {"model": model_of(running), "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    whole = await client.chat.completions.create(**ask, max_tokens=16, temperature=0)  # type: ignore[call-overload]
    assert "Paris" in whole.choices[0].message.content
    streamed = await client.chat.completions.create(**ask, max_tokens=16, temperature=0, stream=True)  # type: ignore[call-overload]
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
    assert text == whole.choices[0].message.content


async def test_64_mixed_streams_at_once_equal_their_solo_runs_and_leave_nothing_behind(
    running: Stack, client: openai.AsyncOpenAI, folder: Path
) -> None:
    rng = random.Random(SEED)
    prompts = prompts_of(AutoTokenizer.from_pretrained(folder), [rng.randrange(1, 120) for _ in range(NUM_STREAMS)], SEED)
    model = model_of(running)
    asks = [
        {"prompt": prompt, "max_tokens": rng.randrange(2, 14), "temperature": rng.choice([0.0, 0.8]), "seed": index}
        for index, prompt in enumerate(prompts)
    ]

    async def stream(ask: dict[str, object]) -> tuple[str, str | None, int]:
        text, reason, num_tokens = "", None, 0
        chunks = await client.completions.create(model=model, stream=True, stream_options={"include_usage": True}, **ask)  # type: ignore[call-overload]
        async for chunk in chunks:
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
        return text, reason, num_tokens

    together = await asyncio.gather(*map(stream, asks))
    alone = [await stream(ask) for ask in asks]
    assert together == alone
    for (_, reason, num_tokens), ask in zip(together, asks, strict=True):
        assert reason == "stop" or num_tokens == ask["max_tokens"]
    await assert_baseline(running)


async def assert_baseline(running: Stack) -> None:
    """No worker runs, holds or reserves anything, and all its blocks are free."""
    environ = environ_of(running)
    with redis.Redis.from_url(environ["TWOSTROKE_REDIS_URL"]) as connection:
        names = [name.decode() for name in connection.zrange(Keys().roster, 0, -1)]
        infos = [read_worker(connection.get(Keys().entry(name))) for name in names]
    assert len(infos) == 2
    channels = Channels(PeerConfig(cluster_secret=environ["TWOSTROKE_CLUSTER_SECRET"]))
    for info in infos:
        status = await control_pb2_grpc.WorkerStub(channels.get(info.address)).GetStatus(control_pb2.GetStatusRequest())
        assert status.num_free_blocks == status.num_blocks - 1
        assert (status.num_running, status.num_waiting, status.num_reservations, status.num_held) == (0, 0, 0, 0)
    await channels.close()


def environ_of(running: Stack) -> dict[str, str]:
    """What the router was told."""
    return psutil.Process(running.pid_of("router")).environ()


async def test_workers_of_a_stack_take_no_calls_without_its_secret(running: Stack) -> None:
    environ = environ_of(running)
    with redis.Redis.from_url(environ["TWOSTROKE_REDIS_URL"]) as connection:
        info = read_worker(connection.get(Keys().entry("decode-0")))
    async with grpc.aio.insecure_channel(info.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            await control_pb2_grpc.WorkerStub(channel).GetStatus(control_pb2.GetStatusRequest())
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    secret = environ["TWOSTROKE_CLUSTER_SECRET"]
    shown = [*running.lines, *(" ".join(p.cmdline()) for p in psutil.Process(running.process.pid).children(recursive=True))]
    assert len(secret) >= 32
    assert not any(secret in text for text in shown)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router", "valkey"])
def test_killed_process_is_restarted_and_the_next_request_succeeds(running: Stack, name: str) -> None:
    old = running.pid_of(name)
    os.kill(old, signal.SIGKILL)
    running.wait_ready()
    body = {"model": model_of(running), "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    asyncio.run(eventually(lambda: running.has_another(name, old), timeout_s=60))


def test_ctrl_c_stops_everything_within_five_seconds(running: Stack) -> None:
    pids = [running.pid_of(name) for name in ("router", "valkey", "prefill-0", "decode-0")]
    assert running.stop() < 5.0
    assert running.process.returncode == 0
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
