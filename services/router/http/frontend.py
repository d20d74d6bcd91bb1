"""What every endpoint works with, and the steps that those which generate share.

read the body ──> find its model ──> [the endpoint: its prompts as token ids] ──> start a run ──> answer it, streamed or whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response

from services.router.config import RouterConfig
from services.router.dispatch.backend import Backend
from services.router.http import limits
from services.router.http.catalog import Catalog, ServedModel
from services.router.http.connection import while_wanted
from services.router.http.context import RequestContext, context_of
from services.router.http.json_response import json_response
from services.router.http.render import Envelope, Writer, collect, stream
from services.router.http.run import Run, TextOptions
from services.router.http.schemas import Body, GenerationBody, parse
from services.router.http.sse import EventStream
from shared.base import request as engine
from shared.base.errors import InvalidRequest

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Frontend:
    settings: RouterConfig
    backend: Backend
    catalog: Catalog

    async def read(self, http: Request, kind: type[B]) -> B:
        limits.check_content_type(http)
        return parse(kind, await limits.read_body(http, self.settings.max_request_bytes))

    def start(
        self,
        request_id: str,
        context: RequestContext,
        model: ServedModel,
        body: GenerationBody,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int | None,
        default_max_tokens: int | None,
        num_logprobs: int | None,
        prompt_param: str,
    ) -> Run:
        """A run that begins when its pieces are asked for. `max_tokens` is what the client asked for, if it did;
        `default_max_tokens` None: all that fits. Raises InvalidRequest."""
        num_choices = len(prompts) * body.n
        if num_choices > limits.MAX_CHOICES:
            raise InvalidRequest(
                f"n is {body.n}, which with {len(prompts)} prompts gives {num_choices} outputs; at most {limits.MAX_CHOICES} are "
                "allowed",
                param="n",
            )
        max_model_len = self.backend.max_model_len(model.name)
        cache_salt = self._cache_salt(context, body)
        requests = []
        for i, token_ids in enumerate(prompts):
            fitted = limits.fit_max_tokens(len(token_ids), max_tokens, default_max_tokens, max_model_len, prompt_param)
            if not body.stream:
                fitted = limits.fit_result(num_choices, fitted, num_logprobs, is_asked=max_tokens is not None)
            sampling = body.sampling(fitted, num_logprobs, model.tokenizer)
            requests.append(engine.Request(f"{request_id}-{i}", token_ids, len(token_ids), sampling, cache_salt, model.name))
        text = TextOptions(body.stop, body.include_stop_str_in_output, body.skip_special_tokens)
        return Run(self.backend, model.tokenizer, requests, text, arrived_at=context.arrived_at, deadline_at=context.deadline_at)

    def _cache_salt(self, context: RequestContext, body: GenerationBody) -> str:
        """What separates prefix caches: tenants from each other, unless they share one, and what a client keeps apart itself."""
        if self.settings.share_prefix_cache or not context.tenant:
            return body.cache_salt
        return f"{context.tenant}:{body.cache_salt}"

    async def answer(self, http: Request, envelope: Envelope, body: GenerationBody, run: Run, writer: Writer) -> Response:
        if body.stream:
            return EventStream(stream(run, writer, envelope, body.include_usage), context_of(http.scope))
        return json_response(await while_wanted(context_of(http.scope), http.receive, collect(run, writer, envelope)))
