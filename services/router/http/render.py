"""What completions and chat completions share in writing their answers: chunks of a stream, whole answers, usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from services.router.http.growing_lists import GrowingLists
from services.router.http.run import Run, Usage
from services.router.http.sse import event
from services.router.text.choice import Piece, ShownToken
from shared.base.request import FinishReason

_TOKENS_AT_ONCE = 64  # with 20 logprobs each, they take 5 ms


class Writer(Protocol):
    """How one API writes a choice. `index` is the choice's number."""

    chunk_object: str
    object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in a chunk ahead of its text, or None."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choice in each of the chunks that show a piece, perhaps none."""

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        """Lists with an item for each of these tokens; None if they were not asked for."""

    def whole(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""


class Envelope:
    """What is around the choices."""

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._model = model
        self._created_s = int(time.time())

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._request_id, "object": kind, "created": self._created_s, "model": self._model, "choices": choices}


async def stream(run: Run, writer: Writer, envelope: Envelope, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events of a run, those of one step together. With `include_usage`, a last one has no choices but the usage, and the
    others say that they have none."""
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def events(choices: list[dict[str, Any]]) -> bytes:
        return b"".join(event(envelope.wrap(writer.chunk_object, [choice]) | no_usage) for choice in choices)

    is_first = True
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            choices = writer.chunks(piece)
            if is_first:
                openings = [writer.opening(index) for index in range(run.num_choices)]
                choices = [opening for opening in openings if opening is not None] + choices
                is_first = False
            if choices:
                yield events(choices)
    if include_usage:
        yield event(envelope.wrap(writer.chunk_object, []) | {"usage": usage_body(run.usage)})


async def collect(run: Run, writer: Writer, envelope: Envelope) -> dict[str, Any]:
    """The whole answer of a run."""
    choices = [_Choice(writer) for _ in range(run.num_choices)]
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            await choices[piece.choice].add(piece)
    return envelope.wrap(writer.object, [choice.whole(i) for i, choice in enumerate(choices)]) | {"usage": usage_body(run.usage)}


class _Choice:
    """One choice of a whole answer as it grows."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._texts: list[str] = []
        self._reason: FinishReason | None = None
        no_logprobs = writer.logprobs(())
        self._logprobs = GrowingLists(no_logprobs) if no_logprobs is not None else None

    async def add(self, piece: Piece) -> None:
        """The event loop has turns in between: others wait while logprobs are written."""
        self._texts.append(piece.text)
        self._reason = piece.finish_reason
        for start in range(0, len(piece.tokens), _TOKENS_AT_ONCE):
            more = self._writer.logprobs(piece.tokens[start : start + _TOKENS_AT_ONCE])
            if self._logprobs is not None and more is not None:
                self._logprobs.add(more)
                await asyncio.sleep(0)

    def whole(self, index: int) -> dict[str, Any]:
        assert self._reason is not None, "all choices have ended"
        logprobs = self._logprobs.whole() if self._logprobs is not None else None
        return self._writer.whole(index, "".join(self._texts), logprobs, self._reason)


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
