"""Logprobs as the two APIs show them.

A token that is only part of a character is written as `bytes:\\xf0\\x9f`, as OpenAI does, so that no two of them look alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.text.choice import ShownToken
from services.router.text.tokenizer import ChatTokenizer

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class LogprobWriter:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def for_chat(self, shown: Sequence[ShownToken]) -> dict[str, Any]:
        """choices[].logprobs of a chat completion or chunk."""
        content = []
        for one in shown:
            entry = self._chat_entry(one.token.token_id, one.token.logprob)
            entry["top_logprobs"] = [self._chat_entry(*top) for top in one.token.top_logprobs]
            content.append(entry)
        return {"content": content, "refusal": None}

    def for_completion(self, shown: Sequence[ShownToken]) -> dict[str, Any]:
        """choices[].logprobs of a completion or chunk. The chosen token is always among `top_logprobs`."""
        return {
            "tokens": [self._text(one.token.token_id) for one in shown],
            "token_logprobs": [_finite(one.token.logprob) for one in shown],
            "top_logprobs": [self._top(one) for one in shown],
            "text_offset": [one.text_offset for one in shown],
        }

    def _top(self, one: ShownToken) -> dict[str, float]:
        top = {self._text(token_id): _finite(logprob) for token_id, logprob in one.token.top_logprobs}
        return top | {self._text(one.token.token_id): _finite(one.token.logprob)}

    def _chat_entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes(token_id)
        return {"token": _as_text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}

    def _text(self, token_id: int) -> str:
        return _as_text(self._tokenizer.token_bytes(token_id))


def _as_text(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "the engine was asked for logprobs"
    return max(logprob, LOWEST_LOGPROB)
