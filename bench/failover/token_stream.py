"""A streamed completion whose every token is known, and what has become of it compared with another run of the same prompt.

Chunks of text do not show where one token ends, so the tokens are asked for by way of their logprobs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

import orjson

from bench.load.exchange import Endpoint, HttpFailure, error_message, exchange

_DATA, _DONE = b"data:", b"[DONE]"


class StreamEnded(Exception):
    """It has ended, well or not, before it had as many tokens as were waited for."""


@dataclass(slots=True)
class TokenStream:
    """One request. `arrived_at` has a time.perf_counter() for each token; those of one chunk came at the same time."""

    prompt: Sequence[int]
    max_tokens: int
    sent_at: float = 0.0
    tokens: list[str] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    error: str = ""
    is_ended: bool = False
    _rest: bytes = b""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        """Infinite if no token came."""
        return self.arrived_at[0] - self.sent_at if self.arrived_at else math.inf

    def longest_gap_s(self, after: float) -> float:
        """The longest time without a token that ended after `after`; 0 if no token came after that."""
        return max((end - start for start, end in pairwise(self.arrived_at) if end > after), default=0.0)

    def gaps_s(self, until: float) -> list[float]:
        """Between tokens that came before `until`."""
        return [end - start for start, end in pairwise(self.arrived_at) if end <= until]

    async def run(self, endpoint: Endpoint, model: str, cache_salt: str, timeout_s: float) -> None:
        """Greedy, to exactly `max_tokens`. Nothing cached under another salt is used. A failure is in `error`, not raised."""
        self.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                await exchange(endpoint, "POST", "/v1/completions", self._body(model, cache_salt), self._feed)
        except TimeoutError:
            self.error = f"not finished after {timeout_s:g} s"
        except HttpFailure as failure:
            self.error = self.error or str(failure)
        finally:
            self.is_ended = True
            self._news.set()

    async def until(self, num_tokens: int) -> None:
        """Returns when that many tokens have come. Raises StreamEnded."""
        while len(self.tokens) < num_tokens:
            if self.is_ended:
                raise StreamEnded(f"a stream ended after {len(self.tokens)} tokens{f': {self.error}' if self.error else ''}")
            self._news.clear()
            await self._news.wait()

    def _body(self, model: str, cache_salt: str) -> bytes:
        greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 0}
        work = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens, "stream": True, "cache_salt": cache_salt}
        return orjson.dumps(work | greedy)

    def _feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA) and (payload := line[len(_DATA) :].strip()) != _DONE:
                self._read(orjson.loads(payload), now)
        self._news.set()

    def _read(self, event: dict[str, Any], now: float) -> None:
        if event.get("error"):
            self.error = error_message(event)
        for choice in event.get("choices") or ():
            tokens = choice["logprobs"]["tokens"]
            self.tokens += tokens
            self.arrived_at += [now] * len(tokens)


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens that one run has and the other has not. As both end after as many tokens, a lost one is followed by one too many at
    the end; a changed one stands where the other run has another."""

    num_lost: int = 0
    num_repeated: int = 0
    num_changed: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.num_lost + other.num_lost, self.num_repeated + other.num_repeated, self.num_changed + other.num_changed
        )

    def __bool__(self) -> bool:
        return self != Difference()


def compare(expected: Sequence[str], got: Sequence[str]) -> Difference:
    difference = Difference()
    for kind, begin, end, begin_got, end_got in SequenceMatcher(None, expected, got, autojunk=False).get_opcodes():
        if kind == "delete":
            difference += Difference(num_lost=end - begin)
        elif kind == "insert":
            difference += Difference(num_repeated=end_got - begin_got)
        elif kind == "replace":
            difference += Difference(num_changed=max(end - begin, end_got - begin_got))
    return difference
