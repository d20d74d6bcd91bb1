"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from services.router.http.context import context_of
from services.router.http.frontend import Frontend
from services.router.http.prompts import read_prompts
from services.router.http.render import Envelope
from services.router.http.schemas import CompletionBody
from services.router.text.choice import Piece, ShownToken
from services.router.text.logprobs import LogprobWriter
from shared.base.errors import InvalidRequest
from shared.base.request import FinishReason

DEFAULT_MAX_TOKENS = 16


class Completions:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def create(self, http: Request) -> Response:
        context = context_of(http.scope)
        body = await self._frontend.read(http, CompletionBody)
        model = self._frontend.catalog.find(body.model)
        if body.echo and body.logprobs is not None:
            raise InvalidRequest("echo is true; this server does not support it together with logprobs", param="echo")
        tokenizer = model.tokenizer
        prompts = await read_prompts(body.prompt, tokenizer)
        request_id = context.new_id("cmpl")
        run = self._frontend.start(
            request_id,
            context,
            model,
            body,
            [prompt.token_ids for prompt in prompts],
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_logprobs=body.logprobs,
            prompt_param="prompt",
        )
        echoes = [prompt.as_text(tokenizer) for prompt in prompts for _ in range(body.n)] if body.echo else None
        logprobs = LogprobWriter(tokenizer.vocabulary) if body.logprobs is not None else None
        return await self._frontend.answer(http, Envelope(request_id, model.name), body, run, CompletionWriter(logprobs, echoes))


class CompletionWriter:
    chunk_object = "text_completion"
    object = "text_completion"

    def __init__(self, logprobs: LogprobWriter | None, echoes: Sequence[str] | None) -> None:
        """`echoes`: per choice, the prompt's text that goes ahead of the output."""
        self._writer = logprobs
        self._echoes = echoes

    def opening(self, index: int) -> dict[str, Any] | None:
        return _choice(index, self._echoes[index], self.logprobs(()), None) if self._echoes is not None else None

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.text or piece.tokens or piece.finish_reason:
            return [_choice(piece.choice, piece.text, self.logprobs(piece.tokens), piece.finish_reason)]
        return []

    def whole(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason) -> dict[str, Any]:
        return _choice(index, self._echoes[index] + text if self._echoes is not None else text, logprobs, reason)

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        return self._writer.for_completion(tokens) if self._writer is not None else None


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason.value if reason is not None else None}
