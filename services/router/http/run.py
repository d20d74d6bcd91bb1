"""The work of one HTTP request: one generation per prompt, n choices each, from the first token to the last piece of text.

Choices are numbered as the client sees them: prompt * n + choice. A stop string may end one choice while the others go on; the
generations are closed when every choice has ended, and also when the client is gone or something failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from services.router.dispatch.backend import Backend, Generation
from services.router.http.fanout import merge
from services.router.http.metrics import CACHED_PROMPT_TOKENS, COMPLETION_TOKENS, PROMPT_TOKENS, TokenClock
from services.router.text.choice import ChoiceText, Piece
from services.router.text.stops import StopMatcher, StopStrings
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import DeadlineExceeded, Internal
from shared.base.request import Output, Request


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text."""

    stops: Sequence[str] = ()
    include_stop: bool = False  # the text of stop strings and stop tokens is output
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class Run:
    def __init__(
        self,
        backend: Backend,
        tokenizer: ChatTokenizer,
        requests: Sequence[Request],
        text: TextOptions,
        *,
        arrived_at: float,
        deadline_at: float,
    ) -> None:
        """`requests`: one per prompt, alike but for their tokens. Moments are those of time.perf_counter()."""
        self._backend = backend
        self._requests = requests
        self._n = requests[0].sampling.n
        self._deadline_at = deadline_at
        self._clock = TokenClock(arrived_at)
        self._choices = _choices(tokenizer, requests, text)
        self._num_open_choices = len(self._choices)
        self._num_cached_tokens = [0] * len(requests)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """So far; final after the last piece."""
        return Usage(
            num_prompt_tokens=sum(request.num_prompt_tokens for request in self._requests),
            num_completion_tokens=sum(choice.num_tokens for choice in self._choices),
            num_cached_tokens=sum(self._num_cached_tokens),
        )

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """One for every output the client may see something of, also an empty one. Raises TwostrokeError. To be closed by the
        caller (`aclosing`): that is what ends the work."""
        generations = self._start()
        try:
            async with aclosing(merge(generations)) as outputs:
                async for prompt, output in outputs:
                    if (piece := self._read(prompt, output)) is not None:
                        if piece.finish_reason is not None and output.finish_reason is None:  # a stop string ended it
                            generations[prompt].stop_choice(output.choice)
                        yield piece
                    if self._num_open_choices == 0:
                        return
            raise Internal("the generation ended before all of its choices had")
        finally:
            await asyncio.gather(*(generation.aclose() for generation in generations))
            self._count()

    def _start(self) -> list[Generation]:
        left_s = self._deadline_at - time.perf_counter()
        if left_s <= 0:
            raise DeadlineExceeded("the request's time was up before it could be started")
        return [self._backend.generate(request, left_s) for request in self._requests]

    def _read(self, prompt: int, output: Output) -> Piece | None:
        index = prompt * self._n + output.choice
        choice = self._choices[index]
        self._num_cached_tokens[prompt] = max(self._num_cached_tokens[prompt], output.num_cached_tokens)
        if choice.finish_reason is not None:  # by a stop string; this was on its way
            return None
        self._clock.tick(index, len(output.tokens))
        piece = choice.feed(output.tokens, output.finish_reason)
        self._num_open_choices -= piece.finish_reason is not None
        return piece

    def _count(self) -> None:
        usage = self.usage
        PROMPT_TOKENS.inc(usage.num_prompt_tokens)
        CACHED_PROMPT_TOKENS.inc(usage.num_cached_tokens)
        COMPLETION_TOKENS.inc(usage.num_completion_tokens)


def _choices(tokenizer: ChatTokenizer, requests: Sequence[Request], text: TextOptions) -> list[ChoiceText]:
    sampling = requests[0].sampling
    stops = StopStrings(text.stops, text.include_stop) if text.stops else None
    return [
        ChoiceText(
            index,
            tokenizer.new_detokenizer(requests[index // sampling.n].token_ids, skip_special_tokens=text.skip_special_tokens),
            StopMatcher(stops) if stops else None,
            min_tokens=sampling.min_tokens,
            show_stop_token=text.include_stop,
            with_logprobs=sampling.num_logprobs is not None,
        )
        for index in range(len(requests) * sampling.n)
    ]
