"""Real text, cut to exact numbers of tokens: the documentation that comes with Python."""

from __future__ import annotations

import random
from functools import cache
from importlib import import_module
from typing import Any


@cache
def _document() -> str:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def prompts_of(tokenizer: Any, lengths: list[int], seed: int) -> list[list[int]]:
    """One run of token ids of each length, each from another place of the text."""
    text, rng = _document(), random.Random(seed)
    prompts = []
    for length in lengths:
        start = rng.randrange(len(text) - 20 * length - 100)
        ids = tokenizer(text[start : start + 20 * length + 100]).input_ids
        assert len(ids) > length
        prompts.append(ids[1 : length + 1])  # the first token may be a piece of a cut word
    return prompts
