"""Several models, namespaces and revisions on one Redis, each process on its own: whoever asks gets an answer of the model it
named, of the same weights from the first token to the last."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.local.valkey import ValkeyAddress
from tests.support.eventually import eventually
from tests.support.parts import Part, free_ports, service_command, started
from tests.support.tiny_model import save_tiny_model
from tests.support.valkey import TestValkey

WORKER_FLAGS = ("--kernels", "reference", "--device", "cpu", "--num-threads", "1", "--num-blocks", "64")
PROMPTS = ["The quick brown fox", "one two three", "jumps over", "the lazy dog"]


@dataclass
class Site:
    folder: Path
    redis_url: str

    def worker(self, role: str, name: str, weights: int, *flags: str) -> Part:
        """`weights`: the seed of its model's weights."""
        model = self.folder / f"weights-{weights}"
        if not model.exists():
            save_tiny_model(model, seed=weights)
        own = ("--port", str(free_ports(1)[0]), "--worker-id", name, "--model", str(model))
        return self._part(role, name, *WORKER_FLAGS, *own, *flags)

    def router(self, name: str, *flags: str) -> tuple[Part, str]:
        (port,) = free_ports(1)
        return self._part("router", name, "--port", str(port), *flags), f"http://127.0.0.1:{port}"

    def _part(self, role: str, name: str, *flags: str) -> Part:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TWOSTROKE_")}
        environ |= {"TWOSTROKE_REDIS_URL": self.redis_url, "OMP_NUM_THREADS": "1"}
        return Part(name, (*service_command(role), *flags), environ, self.folder / f"{name}.log")


@pytest.fixture
async def site(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Site]:
    valkey = TestValkey(ValkeyAddress(port=unused_tcp_port))
    await valkey.start()
    yield Site(tmp_path, valkey.url)
    await valkey.stop()


async def ask(client: httpx.AsyncClient, url: str, **body: Any) -> httpx.Response:
    options = {"max_tokens": 24, "ignore_eos": True, "seed": 7}
    return await client.post(f"{url}/v1/completions", json={"prompt": PROMPTS[0], **options, **body})


async def texts(client: httpx.AsyncClient, url: str, **body: Any) -> list[str]:
    """The answers to all prompts, in order."""
    replies = await asyncio.gather(*(ask(client, url, prompt=prompt, **body) for prompt in PROMPTS))
    return [reply.json()["choices"][0]["text"] for reply in replies]


async def listed(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    return {card["id"]: card["max_model_len"] for card in (await client.get(f"{url}/v1/models")).json()["data"]}


async def test_models_and_namespaces_share_a_redis_and_routers_serve_all_models_of_theirs(site: Site) -> None:
    first = site.worker("decode", "x-first", 1, "--colocated", "--namespace", "x", "--served-model-name", "first")
    second = site.worker("decode", "x-second", 2, "--colocated", "--namespace", "x", "--max-model-len", "256")
    other = site.worker("decode", "y-first", 2, "--colocated", "--namespace", "y", "--served-model-name", "first")
    routers, urls = zip(*(site.router(f"router-{i}", "--namespace", namespace) for i, namespace in enumerate("xxy")), strict=True)
    async with httpx.AsyncClient(timeout=60) as client, started(first, second, other, *routers):
        for url in urls[:2]:
            await eventually(lambda url=url: _has(client, url, {"first": 512, "weights-2": 256}))  # type: ignore[misc]
        assert await listed(client, urls[2]) == {"first": 512}
        answers = [await texts(client, url, model="first") for url in urls]
        answers += [await texts(client, url, model="weights-2") for url in urls[:2]]
        of_first, again, of_other_first, of_second, of_second_again = answers
        assert of_first == again
        assert of_second == of_second_again == of_other_first  # the same weights under another name, in another namespace
        assert not set(of_first) & set(of_second)
        assert await texts(client, urls[2]) == of_other_first  # no model named: the only one
        missing, unknown = await ask(client, urls[0]), await ask(client, urls[2], model="weights-2")
        assert (missing.status_code, unknown.status_code) == (400, 404)
        assert "'first', 'weights-2'" in missing.json()["error"]["message"]
        await second.stop()
        await eventually(lambda: _has(client, urls[0], {"first": 512}))
        assert await texts(client, urls[0]) == of_first


async def _has(client: httpx.AsyncClient, url: str, models: dict[str, int]) -> bool:
    return await listed(client, url) == models


async def test_every_answer_of_a_rolling_update_is_wholly_of_one_revision(site: Site) -> None:
    def pair(weights: int) -> tuple[Part, Part]:
        name = ("--served-model-name", "served")
        return tuple(site.worker(role, f"{role}-{weights}", weights, *name) for role in ("prefill", "decode"))  # type: ignore[return-value]

    old, new = pair(1), pair(2)
    router, url = site.router("router", "--handoff", "always")
    answers: list[tuple[int, str]] = []
    is_updated = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient, number: int) -> None:
        while not is_updated.is_set():
            reply = await ask(client, url, model="served", prompt=PROMPTS[number])
            assert reply.status_code == 200, reply.text
            answers.append((number, reply.json()["choices"][0]["text"]))

    async with httpx.AsyncClient(timeout=60) as client, started(*old, router), asyncio.TaskGroup() as load:
        of_old = await texts(client, url, model="served")
        for number in range(len(PROMPTS)):
            load.create_task(keep_asking(client, number))
        async with started(*new):
            for part in old:
                part.signal(signal.SIGTERM)
            for part in old:
                assert await part.wait() == 0
            num_before = len(answers)
            await eventually(lambda: len(answers) > num_before + 2 * len(PROMPTS), timeout_s=30)
            is_updated.set()
            of_new = await texts(client, url, model="served")
    assert not set(of_old) & set(of_new)
    assert {text for number, text in answers if text not in (of_old[number], of_new[number])} == set()
    assert all(any(answers.count((number, text)) for number, text in enumerate(own)) for own in (of_old, of_new))
