"""One output on its way from tokens to text: detokenize, look for stop strings, release what is safe.

    token ──> detokenizer ──> decoded text ──> stop matcher ──> released text
                                                    └── held back: could still become a stop string

A token goes out (with its logprob) in the piece that releases the last of its text, so text and logprobs stay aligned, and what
is shown does not depend on how many tokens came at once. The last token is the one that ended the output: a stop token, the last
within `max_tokens`, or the one that completed a stop string. All tokens up to it are counted, and all that are counted go out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.text.detokenizer import Detokenizer
from services.router.text.stops import StopMatcher
from shared.base.request import FinishReason, Token


@dataclass(frozen=True, slots=True)
class ShownToken:
    token: Token
    text: str  # what it added to the decoded text; empty where it is a part of a character, or hidden
    text_offset: int  # of its first character in the output


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to one choice, as the client is to see it."""

    choice: int
    text: str
    tokens: Sequence[ShownToken]  # empty unless logprobs are asked for
    finish_reason: FinishReason | None


class ChoiceText:
    def __init__(
        self,
        choice: int,
        detokenizer: Detokenizer,
        stops: StopMatcher | None,
        *,
        min_tokens: int = 0,
        show_stop_token: bool = False,
        with_logprobs: bool = False,
    ) -> None:
        """A stop string counts if it ends behind the first `min_tokens` tokens. `show_stop_token`: its text, too, is output."""
        self._choice = choice
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._show_stop_token = show_stop_token
        self._with_logprobs = with_logprobs
        self._pending: deque[ShownToken] = deque()
        self._num_decoded_chars = 0
        self._num_released_chars = 0
        self.num_tokens = 0  # as usage counts them: up to the one that ended the output
        self.finish_reason: FinishReason | None = None

    def feed(self, tokens: Sequence[Token], reason: FinishReason | None) -> Piece:
        """The next tokens; `reason` if the engine ended the output with the last of them (for STOP, a stop token)."""
        ends_silently = reason is FinishReason.STOP and not self._show_stop_token
        text = ""
        for i, token in enumerate(tokens):
            is_hidden = ends_silently and i == len(tokens) - 1
            text += self._read(token, is_hidden)
            if self.finish_reason is not None:
                break
        else:
            if reason is not None:
                text += self._finish(reason)
        return Piece(self._choice, text, self._release_tokens(), self.finish_reason)

    def _read(self, token: Token, is_hidden: bool) -> str:
        self.num_tokens += 1
        text = "" if is_hidden else self._detokenizer.step(token.token_id)
        if self._with_logprobs:
            self._pending.append(ShownToken(token, text, self._num_decoded_chars))
        return self._release(text)

    def _release(self, text: str) -> str:
        self._num_decoded_chars += len(text)
        if self._stops is not None:
            text, is_stopped = self._stops.feed(text, may_stop=self.num_tokens > self._min_tokens)
            if is_stopped:
                self.finish_reason = FinishReason.STOP
        self._num_released_chars += len(text)
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._release(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._stops is not None:
                text += self._stops.flush()
        return text

    def _release_tokens(self) -> list[ShownToken]:
        released = []
        while self._pending and self._is_shown(self._pending[0]):
            released.append(self._pending.popleft())
        return released

    def _is_shown(self, shown: ShownToken) -> bool:
        if self.finish_reason is not None:
            return True
        return shown.text_offset < self._num_released_chars and shown.text_offset + len(shown.text) <= self._num_released_chars
