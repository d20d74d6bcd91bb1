"""POST /tokenize and /detokenize: what the tokenizer and the chat template make of a text."""

from __future__ import annotations

import asyncio

from fastapi import Request, Response

from services.router.http import limits
from services.router.http.catalog import ServedModel
from services.router.http.frontend import Frontend
from services.router.http.json_response import json_response
from services.router.http.messages import for_template
from services.router.http.schemas import DetokenizeBody, TokenizeBody
from shared.base.errors import InvalidRequest


class Tokens:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def tokenize(self, http: Request) -> Response:
        body = await self._frontend.read(http, TokenizeBody)
        model = self._frontend.catalog.find(body.model)
        token_ids = await (self._prompt(body, model) if body.prompt is not None else self._chat(body, model))
        max_model_len = self._frontend.backend.max_model_len(model.name)
        return json_response({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids})

    async def detokenize(self, http: Request) -> Response:
        body = await self._frontend.read(http, DetokenizeBody)
        tokenizer = self._frontend.catalog.find(body.model).tokenizer
        limits.check_token_ids("tokens", body.tokens, tokenizer.vocab_size)
        # Beside the event loop: a million ids take 0.3 s, without the interpreter lock.
        return json_response({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})

    async def _prompt(self, body: TokenizeBody, model: ServedModel) -> list[int]:
        if body.messages:
            raise _not_one_of_both()
        add_special_tokens = body.add_special_tokens is not False
        [token_ids] = await model.tokenizer.encode([body.prompt or ""], add_special_tokens=add_special_tokens)
        return token_ids

    async def _chat(self, body: TokenizeBody, model: ServedModel) -> list[int]:
        if not body.messages:
            raise _not_one_of_both()
        if body.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is true; a chat's special tokens are written by its template", param="add_special_tokens"
            )
        return await model.tokenizer.encode_chat(
            for_template(body.messages),
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
            parse_special_tokens=self._frontend.settings.special_tokens_in_messages == "parse",
        )


def _not_one_of_both() -> InvalidRequest:
    return InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
