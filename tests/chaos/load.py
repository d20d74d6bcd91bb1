"""Steady mixed load: a fixed set of requests, their answers when nothing is wrong, and streams that ask them again and compare.

A client retries only if its router was killed under it. Everything else that is not exactly the expected answer is a violation.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.site import MODEL_NAME, Site
from tests.support.tiny_tokenizer import SENTENCES

NUM_STREAMS = 16
NUM_ASKS = 40
_REQUEST_TIMEOUT_S = 110.0  # beyond the router's own deadline
_VOCABULARY = range(3, 400)


@dataclass(frozen=True, slots=True)
class Ask:
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    text: str = ""
    finish_reason: str | None = None
    tokens: tuple[str, ...] = ()  # where logprobs were asked for


@dataclass(frozen=True, slots=True)
class Answer:
    choices: tuple[ChoiceAnswer, ...]
    num_prompt_tokens: int
    num_completion_tokens: int


class Refused(Exception):
    """An HTTP error, or an error inside the stream."""


class Cut(Exception):
    """The stream ended without its end mark. `so_far` is what had come."""

    def __init__(self, so_far: tuple[ChoiceAnswer, ...]) -> None:
        super().__init__("the stream was cut")
        self.so_far = so_far


def make_asks(rng: random.Random, count: int = NUM_ASKS) -> list[Ask]:
    """Greedy and sampled, one output and several, with and without stop strings and logprobs; many share a prefix."""
    prefix = rng.choices(_VOCABULARY, k=64)
    return [_make_ask(rng, seed, prefix) for seed in range(count)]


def _make_ask(rng: random.Random, seed: int, prefix: list[int]) -> Ask:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "max_tokens": rng.choice([1, 2, *rng.choices(range(3, 40), k=6)]),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "seed": seed,
        "n": rng.choice([1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.2:
        body["stop"] = [rng.choice("aeinst"), "zz"]
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "top_p": 0.9}
    if rng.random() < 0.25:
        text = " ".join(rng.choices(SENTENCES, k=rng.randrange(1, 4)))
        return Ask("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]})
    if rng.random() < 0.3:
        body["logprobs"] = 2
    shared = prefix[: rng.choice([0, 32, 64])]
    return Ask("/v1/completions", body | {"prompt": shared + rng.choices(_VOCABULARY, k=rng.randrange(1, 150))})


async def answer(client: httpx.AsyncClient, ask: Ask, streamed: bool) -> Answer:
    """Raises Refused, Cut, or an httpx.TransportError."""
    if not streamed:
        reply = await client.post(ask.path, json=ask.body)
        if reply.status_code != 200:
            raise Refused(f"{reply.status_code} {reply.text[:200]}")
        body = reply.json()
        return _answer([_choice(c, c.get("message", {}).get("content") or c.get("text", "")) for c in body["choices"]], body)
    parts = [ChoiceAnswer()] * ask.body["n"]
    try:
        return await _read_stream(client, ask, parts)
    except httpx.TransportError as error:
        raise Cut(tuple(parts)) from error


async def _read_stream(client: httpx.AsyncClient, ask: Ask, parts: list[ChoiceAnswer]) -> Answer:
    body = {**ask.body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", ask.path, json=body) as reply:
        if reply.status_code != 200:
            raise Refused(f"{reply.status_code} {(await reply.aread()).decode()[:200]}")
        last: dict[str, Any] = {}
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return _answer(parts, last)
            if line:
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    raise Refused(f"in the stream: {last['error']}")
                for raw in last["choices"]:
                    parts[raw["index"]] = _joined(parts[raw["index"]], raw)
    raise Cut(tuple(parts))


def _joined(part: ChoiceAnswer, raw: Mapping[str, Any]) -> ChoiceAnswer:
    new = _choice(raw, raw.get("delta", {}).get("content") or raw.get("text") or "")
    return ChoiceAnswer(part.text + new.text, new.finish_reason or part.finish_reason, part.tokens + new.tokens)


def _choice(raw: Mapping[str, Any], text: str) -> ChoiceAnswer:
    return ChoiceAnswer(text, raw["finish_reason"], tuple((raw.get("logprobs") or {}).get("tokens", ())))


def _answer(choices: Sequence[ChoiceAnswer], body: Mapping[str, Any]) -> Answer:
    usage = body["usage"]
    return Answer(tuple(choices), usage["prompt_tokens"], usage["completion_tokens"])


@dataclass
class Tally:
    num_exact: int = 0
    num_retried: int = 0  # attempts that a killed router ended
    num_left: int = 0  # clients that went away, as they were meant to
    slowest_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def num_done(self) -> int:
        return self.num_exact + len(self.violations)


def _client(site: Site) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=site.url, timeout=_REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=None))


class Load:
    def __init__(self, site: Site, asks: Sequence[Ask], rng: random.Random, pause_s: float = 0.0) -> None:
        """A stream pauses for `pause_s` on average before it asks again."""
        self._pause_s = pause_s
        self.tally = Tally()
        self._site = site
        self._asks = asks
        self._rng = rng
        self._expected: list[Answer] = []
        self._client = _client(site)

    async def close(self) -> None:
        await self._client.aclose()

    async def hang_up(self) -> None:
        """Closes the connections that are kept for the next requests."""
        await self._client.aclose()
        self._client = _client(self._site)

    async def learn(self) -> None:
        """The answers when nothing is wrong. Each request is asked alone, whole, and once more as a stream."""
        self._expected = [await answer(self._client, ask, streamed=False) for ask in self._asks]
        for ask, expected in zip(self._asks, self._expected, strict=True):
            assert await answer(self._client, ask, streamed=True) == expected, f"undisturbed runs differ for {ask}"

    async def run(self, enough: asyncio.Event, num_streams: int = NUM_STREAMS) -> None:
        """Until `enough`, and then until all answers have come."""
        rngs = [random.Random(self._rng.random()) for _ in range(num_streams)]
        await asyncio.gather(*(self._stream(rng, enough) for rng in rngs))

    async def burst(self, count: int, rng: random.Random) -> None:
        """So many at once: more than the workers have room for."""
        await asyncio.gather(*(self._serve(rng.randrange(len(self._asks)), streamed=True) for _ in range(count)))

    async def leave(self, rng: random.Random) -> None:
        """A client that goes away at some moment: before, while or after its prompt is computed, or between tokens."""
        ask = rng.choice(self._asks)
        try:
            async with asyncio.timeout(rng.choice([0.0, 0.02, 0.1, 0.3]) * rng.random() + 0.001):
                await answer(self._client, ask, streamed=rng.random() < 0.8)
        except (TimeoutError, httpx.TransportError, Cut, Refused):
            self.tally.num_left += 1

    async def once(self) -> None:
        """Every request once, compared."""
        for index in range(len(self._asks)):
            await self._serve(index, streamed=bool(index % 2))

    async def _stream(self, rng: random.Random, enough: asyncio.Event) -> None:
        while not enough.is_set():
            await self._serve(rng.randrange(len(self._asks)), streamed=rng.random() < 0.8)
            await asyncio.sleep(rng.uniform(0.0, 2.0 * self._pause_s))

    async def _serve(self, index: int, streamed: bool) -> None:
        """One request, again as often as its router is killed."""
        while True:
            await self._site.router_is_up.wait()
            num_kills = self._site.num_router_kills
            begin = time.monotonic()
            try:
                got = await answer(self._client, self._asks[index], streamed)
            except (httpx.TransportError, Cut) as error:
                self._check_prefix(index, error)
                if self._site.num_router_kills == num_kills:
                    return self._violate(index, f"{type(error).__name__} {error!r} from a living router")
                self.tally.num_retried += 1
                continue
            except Refused as error:
                return self._violate(index, str(error))
            self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - begin)
            return self._compare(index, got, streamed)

    def _compare(self, index: int, got: Answer, streamed: bool) -> None:
        if got != self._expected[index]:
            return self._violate(index, f"got {got}, expected {self._expected[index]}")
        self.tally.num_exact += 1
        body = self._asks[index].body
        self.tally.by_kind["greedy" if body["temperature"] == 0 else "sampled"] += 1
        self.tally.by_kind["streamed" if streamed else "whole"] += 1
        self.tally.by_kind[f"n={body['n']}"] += 1

    def _check_prefix(self, index: int, error: Exception) -> None:
        """What a killed router had sent was right as far as it went."""
        for part, whole in zip(error.so_far if isinstance(error, Cut) else (), self._expected[index].choices, strict=False):
            if not whole.text.startswith(part.text):
                self._violate(index, f"sent {part.text!r} of {whole.text!r}")

    def _violate(self, index: int, what: str) -> None:
        self.tally.violations.append(f"{what[:1000]} (request {index}: {json.dumps(self._asks[index].body)[:300]})")
