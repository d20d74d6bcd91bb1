"""A client of /v1/completions that stamps every chunk as it arrives.

prompt ids ─> POST ─> event, event, … ─> [DONE]
               │        └─ one stamp each ──> Completion.arrived_at
               └─ Completion.sent_at, before the connection is made
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from bench.load.exchange import Endpoint, HttpFailure, error_message, exchange

_DATA, _DONE = b"data:", b"[DONE]"


@dataclass(slots=True)
class Completion:
    """One request and what came back. Times are time.perf_counter()'s."""

    num_prompt_tokens: int
    max_tokens: int
    sent_at: float = 0.0
    arrived_at: list[float] = field(default_factory=list)  # of each chunk that shows output
    num_reported_tokens: int | None = None  # the server's own count, if it gave one
    error: str = ""

    @property
    def num_output_tokens(self) -> int:
        """A chunk may hold several tokens, so the server's count goes first."""
        return len(self.arrived_at) if self.num_reported_tokens is None else self.num_reported_tokens

    @property
    def is_good(self) -> bool:
        return not self.error and bool(self.arrived_at)

    @property
    def ttft_s(self) -> float:
        return self.arrived_at[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Between a chunk and the next, one fewer than chunks."""
        return [after - before for before, after in pairwise(self.arrived_at)]


class Observer:
    """Who is told what happens to completions; this one does not care."""

    def chunk(self, completion: Completion) -> None:
        """Another one arrived."""

    def ended(self, completion: Completion) -> None:
        """Well, with an error, or cancelled."""


OnChunk = Callable[[Completion], None]


class Client:
    """`num_chunks` counts those of all completions."""

    def __init__(self, endpoint: Endpoint, model: str, timeout_s: float, observer: Observer) -> None:
        self._endpoint = endpoint
        self._model = model
        self._timeout_s = timeout_s
        self._observer = observer
        self.num_chunks = 0

    async def complete(self, prompt: Sequence[int], max_tokens: int) -> Completion:
        """A greedy completion of exactly `max_tokens` tokens. A failure is in the result, not raised."""
        completion = Completion(len(prompt), max_tokens)
        await self.run(completion, prompt)
        return completion

    async def run(self, completion: Completion, prompt: Sequence[int], on_chunk: OnChunk | None = None) -> None:
        """The same for a caller that keeps the completion: cancelled, it holds what has arrived until then, without an error."""
        body = _body(self._model, prompt, completion.max_tokens)

        def note(completion: Completion) -> None:
            self.num_chunks += 1
            self._observer.chunk(completion)
            if on_chunk is not None:
                on_chunk(completion)

        reader = _EventReader(completion, note)
        completion.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                await exchange(self._endpoint, "POST", "/v1/completions", body, reader.feed)
            completion.error = completion.error or _shortfall(completion)
        except TimeoutError:
            completion.error = f"not finished after {self._timeout_s:g} s"
        except HttpFailure as failure:
            completion.error = completion.error or str(failure)
        finally:
            self._observer.ended(completion)


class _EventReader:
    """Server-sent events, as far as completions use them: lines that begin with `data:`, one JSON object each."""

    def __init__(self, completion: Completion, on_chunk: OnChunk) -> None:
        self._completion = completion
        self._on_chunk = on_chunk
        self._rest = b""

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and (payload := line[len(_DATA) :].strip()) != _DONE:
                self._read(orjson.loads(payload), now)

    def _read(self, event: dict[str, Any], now: float) -> None:
        completion = self._completion
        if event.get("error"):
            completion.error = error_message(event)
        elif usage := event.get("usage"):
            completion.num_reported_tokens = usage["completion_tokens"]
        for choice in event.get("choices") or ():
            if choice.get("text") or not choice.get("finish_reason"):  # the last one may hold a reason only
                completion.arrived_at.append(now)
                self._on_chunk(completion)


async def fetch_json(endpoint: Endpoint, method: str, path: str, body: object = None) -> Any:
    """Raises HttpFailure."""
    answer = bytearray()
    await exchange(endpoint, method, path, b"" if body is None else orjson.dumps(body), answer.extend)
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise HttpFailure(f"{path} did not answer with JSON: {error}") from None


def _body(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    return orjson.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _shortfall(completion: Completion) -> str:
    """Fewer tokens than asked for are less work, and would make an engine look fast."""
    if not completion.arrived_at:
        return "the answer held no output"
    if completion.num_reported_tokens is not None and completion.num_reported_tokens < completion.max_tokens:
        return f"{completion.num_reported_tokens} tokens came of {completion.max_tokens}; the server must support ignore_eos"
    return ""
