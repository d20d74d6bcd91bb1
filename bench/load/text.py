"""Prompts cut at random from real text: Python's own documentation, as the language reference comes with every Python.

Repeated or random tokens would flatter an engine, by prefix caching, or by text that is easier to predict than people's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.load.client import fetch_json
from bench.load.exchange import Endpoint, HttpFailure
from shared.base.errors import ConfigError


def documentation() -> list[str]:
    """Python's language reference, a topic each; about half a million characters."""
    from pydoc_data.topics import topics  # here, not above: half a megabyte of source

    return [topics[name] for name in sorted(topics)]


def tokenize_with(folder: Path, texts: Sequence[str]) -> list[int]:
    """By the tokenizer.json of a model's folder, without special tokens. Raises ConfigError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--tokenizer is {str(folder)!r}; it must be a folder with a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [token_id for one in tokenizer.encode_batch(list(texts), add_special_tokens=False) for token_id in one.ids]


async def tokenize_at(endpoint: Endpoint, model: str, texts: Sequence[str]) -> list[int]:
    """By the server's POST /tokenize. Raises ConfigError if it has none."""
    token_ids: list[int] = []
    for text in texts:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            token_ids += (await fetch_json(endpoint, "POST", "/tokenize", body))["tokens"]
        except (HttpFailure, KeyError, TypeError) as error:
            raise ConfigError(
                f"the server does not tokenize text at /tokenize; name the model's folder with --tokenizer ({error})"
            ) from None
    return token_ids


class PromptSource:
    """Prompts of a given length from `token_ids`. The same seed gives the same prompts in the same order."""

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._token_ids = token_ids
        self._random = random.Random(seed)

    def cut(self, num_tokens: int) -> list[int]:
        num_places = len(self._token_ids) - num_tokens + 1
        if num_places < 1:
            raise ConfigError(f"a prompt of {num_tokens} tokens is too long; the text to cut from has {len(self._token_ids)}")
        start = self._random.randrange(num_places)
        return list(self._token_ids[start : start + num_tokens])
