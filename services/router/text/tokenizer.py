"""The model's tokenizer and chat template, as the router needs them: text to ids, ids to text, and who ends an output.

transformers loads the tokenizer and renders chats; ids and text go through the Rust tokenizer below it, which gives up the
interpreter lock, so that long prompts are tokenized beside the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders

from services.router.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from shared.base.errors import ConfigError, InvalidRequest

# Shorter texts (about a millisecond) are tokenized at once: a thread costs more.
MAX_INLINE_CHARS = 4096


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What config.json and generation_config.json say that the tokenizer does not."""

    vocab_size: int | None
    eos_token_ids: frozenset[int]


class ChatTokenizer:
    def __init__(self, tokenizer: Any, facts: ModelFacts, chat_template: str | None = None) -> None:
        """`tokenizer` is a transformers tokenizer on top of `tokenizers`; `chat_template` replaces its own."""
        self._chat = tokenizer
        self._chat_template = chat_template or tokenizer.chat_template
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}
        own_eos = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
        self.eos_token_ids: frozenset[int] = facts.eos_token_ids | own_eos
        self.vocab_size: int = facts.vocab_size or len(tokenizer)

    @classmethod
    def load(cls, model: str, revision: str = "", chat_template: str = "") -> ChatTokenizer:
        """From a folder or a hub id; `chat_template` names a file. Raises ConfigError if something cannot be read."""
        from transformers import AutoTokenizer  # here, not above: it takes seconds

        if not model:
            raise ConfigError("--model is missing: a folder or a hub id with the model's tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, revision=revision or None)
            facts = _model_facts(model, revision or None)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"cannot load the tokenizer of --model {model}: {reason}") from None
        if not tokenizer.is_fast:
            raise ConfigError(f"the tokenizer of --model {model} has no tokenizer.json and cannot be converted to one")
        return cls(tokenizer, facts, _read_template(chat_template) if chat_template else None)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        if sum(map(len, texts)) <= MAX_INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        return await asyncio.to_thread(self._encode, texts, add_special_tokens)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text, special tokens included."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def new_detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self.token_bytes, skipped)
        return WindowDetokenizer(self._tokenizer, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, perhaps a part of a character. Empty for an id that stands for nothing."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            return byte_level_bytes(piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's byte fallback
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()  # SentencePiece writes a space as a low block

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The chat as the model's template writes it. `variables` are the client's, and may not replace what the template or
        the renderer itself takes. Raises InvalidRequest."""
        if not self._chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        for name in variables:
            if name in self._reserved:
                raise InvalidRequest(f"chat_template_kwargs cannot set {name!r}", param="chat_template_kwargs")
        try:
            text: str = self._chat.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except (TemplateError, TypeError, ValueError) as error:  # templates refuse roles and orders they do not know
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from None
        return text


def byte_level_bytes(piece: str) -> bytes:
    """What a token of a byte-level vocabulary stands for: each of its characters is a byte. A token with others (added to the
    vocabulary as plain text) stands for itself."""
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, piece))
    except KeyError:
        return piece.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters are themselves, all other bytes follow in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def _model_facts(model: str, revision: str | None) -> ModelFacts:
    config = _read_json(model, "config.json", revision)
    generation = _read_json(model, "generation_config.json", revision)
    config = config.get("text_config") or config  # of a multimodal model, the part that speaks
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return ModelFacts(vocab_size=config.get("vocab_size"), eos_token_ids=frozenset(eos_ids))


def _read_json(model: str, name: str, revision: str | None) -> dict[str, Any]:
    """The model's file as a dict; empty if the model has no such file."""
    from transformers.utils import cached_file

    path = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    found: dict[str, Any] = json.loads(Path(path).read_bytes()) if path else {}
    return found


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"cannot read --chat-template {path}: {error.strerror}") from None
