"""One output on its way from tokens to text: detokenize, look for stop strings, release what is safe.

    token ──> detokenizer ──> decoded text ──> stop matcher ──> released text
                                                    └── held back: could still become a stop string

A token goes out (with its logprob) in the piece that releases the last of its text, so text and logprobs stay aligned, and what
is shown does not depend on how many tokens came at once. With a stop string found, tokens that begin behind the cut never go out.
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
        """Stop strings count from token number `min_tokens` on. `show_stop_token`: its text, too, is output."""
        self._choice = choice
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._show_stop_token = show_stop_token
        self._with_logprobs = with_logprobs
        self._pending: deque[tuple[Token, int, int]] = deque()  # token, start and end of its text
        self._num_decoded_chars = 0
        self._num_released_chars = 0
        self._stop_string_found = False
        self.num_tokens = 0  # as usage counts them: up to the one that ended the output
        self.finish_reason: FinishReason | None = None

    def feed(self, tokens: Sequence[Token], reason: FinishReason | None) -> Piece:
        """The next tokens; `reason` if the engine ended the output with the last of them (for STOP, a stop token)."""
        has_silent_end = reason is FinishReason.STOP and not self._show_stop_token and bool(tokens)
        texts = []
        for token in tokens[:-1] if has_silent_end else tokens:
            self.num_tokens += 1
            texts.append(self._read(token))
            if self._stop_string_found:
                break
        else:
            self.num_tokens += has_silent_end
            if reason is not None:
                texts.append(self._finish(reason))
        return Piece(self._choice, "".join(texts), self._release_tokens(), self.finish_reason)

    def _read(self, token: Token) -> str:
        text = self._detokenizer.step(token.token_id)
        start = self._num_decoded_chars
        self._num_decoded_chars += len(text)
        if self._with_logprobs:
            self._pending.append((token, start, self._num_decoded_chars))
        return self._release(text)

    def _release(self, text: str) -> str:
        if self._stops is not None and self.num_tokens >= self._min_tokens:
            text, self._stop_string_found = self._stops.feed(text)
            if self._stop_string_found:
                self.finish_reason = FinishReason.STOP
        self._num_released_chars += len(text)
        return text

    def _finish(self, reason: FinishReason) -> str:
        tail = self._detokenizer.flush()
        self._num_decoded_chars += len(tail)
        text = self._release(tail)
        if not self._stop_string_found:
            self.finish_reason = reason
            held = self._stops.flush() if self._stops is not None else ""
            self._num_released_chars += len(held)
            text += held
        return text

    def _release_tokens(self) -> list[ShownToken]:
        released = []
        while self._pending and self._is_shown(*self._pending[0][1:]):
            token, start, _ = self._pending.popleft()
            released.append(ShownToken(token, start))
        return released

    def _is_shown(self, start: int, end: int) -> bool:
        if self._stop_string_found:
            return start < self._num_released_chars
        if self.finish_reason is not None:
            return True
        return start < self._num_released_chars and end <= self._num_released_chars
