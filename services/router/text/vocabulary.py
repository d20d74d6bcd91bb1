"""What each token of a vocabulary stands for, as bytes: a token may be only a part of a character.

Three kinds of vocabulary:

- byte-level (GPT-2, Llama 3, Qwen): each character of a token's name is one byte;
- with byte fallback (SentencePiece: Llama 2, Mistral, Gemma): a token named `<0xE2>` is that byte, all others are text;
- any other (WordPiece, Unigram): all tokens are text.

A token's text is that which it has behind other text: at the very beginning some decoders drop a space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        names = tokenizer.get_vocab()
        self.bytes_of_fallback: dict[int, int] = {} if self.is_byte_level else _fallback_bytes(tokenizer, names)
        self.max_id = max(names.values(), default=-1)
        self._special_id_of = {self.name(i): i for i in self.special_ids}
        self._bytes_of: dict[int, bytes] = {}
        self._anchor = _anchor(names)

    def name(self, token_id: int) -> str | None:
        """None for an id that stands for nothing."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def special_id(self, text: str) -> int | None:
        """The special token of this name, if there is one."""
        return self._special_id_of.get(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text, special tokens included."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, perhaps a part of a character. Empty for an id that stands for nothing."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        name = self.name(token_id)
        if name is None:
            return b""
        if self.is_byte_level:
            return byte_level_bytes(name)
        if token_id in self.bytes_of_fallback:
            return bytes([self.bytes_of_fallback[token_id]])
        return self.decode([*self._anchor, token_id])[len(self.decode(self._anchor)) :].encode()


def _fallback_bytes(tokenizer: Tokenizer, names: dict[str, int]) -> dict[int, int]:
    """The byte of each token id that its decoder takes for one."""
    found = {token_id: int(match[1], 16) for name, token_id in names.items() if (match := _BYTE_TOKEN.fullmatch(name))}
    return {token_id: byte for token_id, byte in found.items() if tokenizer.decode([token_id]) != f"<0x{byte:02X}>"}


def _anchor(names: dict[str, int]) -> list[int]:
    """A token of plain text, as what may come before another."""
    return next(([names[name]] for name in ("a", "e", "1", "\u2581a", "the") if name in names), [])


def byte_level_bytes(name: str) -> bytes:
    """What a token of a byte-level vocabulary stands for: each character of its name is a byte. A name with other characters
    (added to the vocabulary as plain text) stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, name))
    except KeyError:
        return name.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are themselves, all other bytes follow in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
