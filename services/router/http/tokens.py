"""POST /tokenize and /detokenize: what the tokenizer and the chat template make of a text."""

from __future__ import annotations

from fastapi import Request, Response

from services.router.http import limits
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
        self._frontend.check_model(body.model)
        text, is_chat = self._text(body), bool(body.messages)
        add_special_tokens = not is_chat if body.add_special_tokens is None else body.add_special_tokens
        [token_ids] = await self._frontend.tokenizer.encode([text], add_special_tokens=add_special_tokens)
        max_model_len = self._frontend.backend.max_model_len
        return json_response({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids})

    async def detokenize(self, http: Request) -> Response:
        body = await self._frontend.read(http, DetokenizeBody)
        self._frontend.check_model(body.model)
        limits.check_token_ids("tokens", body.tokens, self._frontend.tokenizer.vocab_size)
        return json_response({"prompt": self._frontend.tokenizer.decode(body.tokens)})

    def _text(self, body: TokenizeBody) -> str:
        if (body.prompt is None) == (not body.messages):
            raise InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
        if body.prompt is not None:
            return body.prompt
        messages = for_template(body.messages)
        return self._frontend.tokenizer.render_chat(messages, body.add_generation_prompt, body.chat_template_kwargs)
