"""From token ids to text, one token at a time: what is given out never changes later and never ends inside a character.

Two kinds of vocabulary need two ways:

- **Byte-level** (GPT-2, Llama 3, Qwen, SmolLM): a token *is* a run of bytes, so an incremental UTF-8 decoder does it, exactly and
  in constant time. (`tokenizers.decoders.DecodeStream` guesses from U+FFFD at the end of the text, and differs from `decode` on
  invalid sequences.)
- **Anything else** (SentencePiece with byte fallback, WordPiece): the text of a token depends on its neighbours, so a short window
  is decoded with and without the new tokens; the difference is the new text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, and a token without text of its own may come before: more are no unfinished character.
MAX_PENDING_TOKENS = 8


class Detokenizer(Protocol):
    def step(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character."""


class ByteDetokenizer:
    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        """`token_bytes` gives a token's bytes; tokens in `skipped` have no text."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """`context` are the ids shown last, `pending` the ids not yet shown; text is decode(context + pending) less decode(context)."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        self._context_len = 0
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        is_open = len(text) <= self._context_len or text.endswith(REPLACEMENT)
        if is_open and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._context + self._pending))

    def _show(self, text: str) -> str:
        new = text[self._context_len :]
        self._context, self._pending = self._pending or self._context, []
        self._context_len = len(self._decode(self._context))
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
