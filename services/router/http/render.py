"""What completions and chat completions share in writing their answers: chunks of a stream, whole answers, usage."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from services.router.http.run import Run, Usage
from services.router.http.sse import event
from services.router.text.choice import Piece, ShownToken
from shared.base.request import FinishReason


class Writer(Protocol):
    """How one API writes a choice. `index` is the choice's number."""

    chunk_object: str
    object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice in a chunk ahead of its text, or None."""

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choice in each of the chunks that show a piece, perhaps none."""

    def whole(self, index: int, text: str, tokens: list[ShownToken], reason: FinishReason) -> dict[str, Any]:
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
    texts: list[list[str]] = [[] for _ in range(run.num_choices)]
    tokens: list[list[ShownToken]] = [[] for _ in range(run.num_choices)]
    reasons: dict[int, FinishReason] = {}
    async with aclosing(run.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.choice].append(piece.text)
            tokens[piece.choice] += piece.tokens
            if piece.finish_reason is not None:
                reasons[piece.choice] = piece.finish_reason
    choices = [writer.whole(i, "".join(texts[i]), tokens[i], reasons[i]) for i in range(run.num_choices)]
    return envelope.wrap(writer.object, choices) | {"usage": usage_body(run.usage)}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
