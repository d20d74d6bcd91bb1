"""The four forms of a completion's prompt: text, texts, token ids, lists of token ids. All become lists of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from services.router.http import limits
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None  # None: the client sent ids

    def as_text(self, tokenizer: ChatTokenizer) -> str:
        return tokenizer.decode(self.token_ids) if self.text is None else self.text


async def read_prompts(raw: Any, tokenizer: ChatTokenizer) -> list[Prompt]:
    """Raises InvalidRequest for any other form, for too many or empty prompts, and for ids outside the vocabulary."""
    if isinstance(raw, str) or _are_ids(raw):
        raw = [raw]
    if not isinstance(raw, list) or not raw:
        raise _wrong_form()
    if len(raw) > limits.MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(raw)} prompts; at most {limits.MAX_PROMPTS} are allowed", param="prompt")
    if all(isinstance(one, str) for one in raw):
        encoded = await tokenizer.encode(raw, add_special_tokens=True)
        prompts = [Prompt(token_ids, text) for token_ids, text in zip(encoded, raw, strict=True)]
    elif all(map(_are_ids, raw)):
        for token_ids in raw:
            limits.check_token_ids("prompt", token_ids, tokenizer.vocab_size)
        prompts = [Prompt(token_ids, None) for token_ids in raw]
    else:
        raise _wrong_form()
    if not all(prompt.token_ids for prompt in prompts):
        raise InvalidRequest("prompt is empty; it must have at least 1 token", param="prompt")
    return prompts


def _are_ids(raw: Any) -> TypeGuard[list[int]]:
    return isinstance(raw, list) and bool(raw) and set(map(type, raw)) == {int}  # bool is another type


def _wrong_form() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids", param="prompt"
    )
