"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from services.router.http.context import context_of
from services.router.http.frontend import Frontend
from services.router.http.messages import for_template
from services.router.http.render import Envelope
from services.router.http.schemas import ChatBody
from services.router.text.choice import Piece, ShownToken
from services.router.text.logprobs import LogprobWriter
from shared.base.request import FinishReason


class ChatCompletions:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def create(self, http: Request) -> Response:
        context = context_of(http.scope)
        body = await self._frontend.read(http, ChatBody)
        model = self._frontend.catalog.find(body.model)
        tokenizer = model.tokenizer
        token_ids = await tokenizer.encode_chat(
            for_template(body.messages),
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
            parse_special_tokens=self._frontend.settings.special_tokens_in_messages == "parse",
        )
        request_id = context.new_id("chatcmpl")
        run = self._frontend.start(
            request_id,
            context,
            model,
            body,
            [token_ids],
            max_tokens=body.max_output_tokens,
            default_max_tokens=None,
            num_logprobs=body.num_logprobs,
            prompt_param="messages",
        )
        logprobs = LogprobWriter(tokenizer.vocabulary) if body.logprobs else None
        return await self._frontend.answer(http, Envelope(request_id, model.name), body, run, ChatWriter(logprobs))


class ChatWriter:
    chunk_object = "chat.completion.chunk"
    object = "chat.completion"

    def __init__(self, logprobs: LogprobWriter | None) -> None:
        self._writer = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        return _delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Text, then, in a chunk of its own, the end."""
        chunks = []
        if piece.text or piece.tokens:
            chunks.append(_delta(piece.choice, {"content": piece.text}, self.logprobs(piece.tokens), None))
        if piece.finish_reason is not None:
            chunks.append(_delta(piece.choice, {}, None, piece.finish_reason))
        return chunks

    def whole(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": reason.value,
        }

    def logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        return self._writer.for_chat(tokens) if self._writer is not None else None


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason.value if reason is not None else None}
