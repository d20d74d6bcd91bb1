"""From token ids to text, one token at a time: what is given out never changes later and never ends inside a character.

An output's text is decode(prompt + output) less decode(prompt), so a detokenizer begins with the prompt's last tokens: they say
whether the output's first token stands at the beginning of a text, and may hold the first bytes of its first character.

- **Byte-level** (GPT-2, Llama 3, Qwen, SmolLM): a token *is* a run of bytes, so an incremental UTF-8 decoder does it, exactly and
  in constant time. (`tokenizers.decoders.DecodeStream` guesses from U+FFFD at the end of the text, and differs from `decode` on
  invalid sequences.)
- **Anything else** (SentencePiece, WordPiece): a token's text depends on whether something comes before it. The token is decoded
  behind the one before it; what that one does not give is its text. Byte tokens are read one by one: `decode` turns each byte of a
  run of byte tokens into U+FFFD if the run has a stray byte; here, the characters before the stray byte have been shown and stay.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.router.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
# Of a prompt's end, enough to find a token with text and the start of an unfinished character.
NUM_PROMPT_TOKENS = 64


class Detokenizer(Protocol):
    def step(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character."""


def new_detokenizer(vocabulary: Vocabulary, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
    skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
    detokenizer = (ByteDetokenizer if vocabulary.is_byte_level else PieceDetokenizer)(vocabulary, skipped)
    for token_id in _end_of(prompt_token_ids, vocabulary):
        detokenizer.step(token_id)
    return detokenizer


def _end_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> Sequence[int]:
    """The last tokens, from one on that does not begin inside a character."""
    end = token_ids[-NUM_PROMPT_TOKENS:]
    if len(end) == len(token_ids):
        return end
    begins = (i for i, token_id in enumerate(end) if not _continues_a_character(vocabulary.token_bytes(token_id)))
    return end[next(begins, len(end)) :]


def _continues_a_character(token_bytes: bytes) -> bool:
    return bool(token_bytes) and 0x80 <= token_bytes[0] < 0xC0


class ByteDetokenizer:
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        """Tokens in `skipped` have no text."""
        self._token_bytes = vocabulary.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer:
    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int]) -> None:
        """Tokens in `skipped` have no text."""
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._context: list[int] = []  # the token before, and any before it that had no text; empty at the beginning
        self._context_text = ""
        self._run = b""  # bytes of a character that is unfinished
        self._run_is_stray = False

    def step(self, token_id: int) -> str:
        if token_id in self._skipped or self._vocabulary.name(token_id) is None:
            return ""
        byte = self._vocabulary.bytes_of_fallback.get(token_id)
        if byte is not None:
            self._context, self._context_text = [token_id], self._vocabulary.decode([token_id])
            return self._read_byte(byte)
        return self.flush() + self._read_piece(token_id)

    def flush(self) -> str:
        """Also the end of a run of bytes."""
        stray, self._run, self._run_is_stray = REPLACEMENT * len(self._run), b"", False
        return stray

    def _read_byte(self, byte: int) -> str:
        self._run += bytes([byte])
        text, num_read = codecs.utf_8_decode(self._run, "ignore", False)
        if self._run_is_stray or (num_read and not _is_whole(self._run[:num_read], text)):
            self._run_is_stray = True
            text, num_read = REPLACEMENT * len(self._run), len(self._run)
        self._run = self._run[num_read:]
        return text

    def _read_piece(self, token_id: int) -> str:
        whole = self._vocabulary.decode([*self._context, token_id])
        text = whole[len(self._context_text) :]
        if text:
            self._context, self._context_text = [token_id], self._vocabulary.decode([token_id])
        else:
            self._context, self._context_text = [*self._context[-1:], token_id], whole
        return text


def _is_whole(run: bytes, text: str) -> bool:
    return text.encode() == run
