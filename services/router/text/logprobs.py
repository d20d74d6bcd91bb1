"""Logprobs as the two APIs show them.

Token strings add up to the text, and `bytes` to its bytes. A token that is only part of a character is written as
`bytes:\\xf0\\x9f`, as OpenAI does, so that no two of them look alike. One whose text is hidden (a stop token) has its name, and no
`bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.text.choice import ShownToken
from services.router.text.vocabulary import Vocabulary

_PART_OF_A_CHARACTER = "bytes:"
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class LogprobWriter:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def for_chat(self, shown: Sequence[ShownToken]) -> dict[str, Any]:
        """choices[].logprobs of a chat completion or chunk."""
        return {"content": [self._chat_token(one) for one in shown], "refusal": None}

    def for_completion(self, shown: Sequence[ShownToken]) -> dict[str, Any]:
        """choices[].logprobs of a completion or chunk. The chosen token is always among `top_logprobs`."""
        return {
            "tokens": [_as_text(self._bytes_of(one)) for one in shown],
            "token_logprobs": [_finite(one.token.logprob) for one in shown],
            "top_logprobs": [self._top_by_text(one) for one in shown],
            "text_offset": [one.text_offset for one in shown],
        }

    def _chat_token(self, one: ShownToken) -> dict[str, Any]:
        """The chosen token is always among the `top_logprobs` that were asked for."""
        top = self._top(one) if one.token.top_logprobs else []
        entry = _chat_entry(self._bytes_of(one), one.token.logprob) | {"top_logprobs": [_chat_entry(*each) for each in top]}
        is_hidden = not one.text and not entry["token"].startswith(_PART_OF_A_CHARACTER)
        return entry | {"bytes": []} if is_hidden else entry

    def _top(self, one: ShownToken) -> list[tuple[bytes, float | None]]:
        """The most likely tokens, best first; the chosen one last if it is none of them."""
        chosen = (self._bytes_of(one), one.token.logprob)
        if all(token_id != one.token.token_id for token_id, _ in one.token.top_logprobs):
            return [*map(self._other, one.token.top_logprobs), chosen]
        return [chosen if top[0] == one.token.token_id else self._other(top) for top in one.token.top_logprobs]

    def _top_by_text(self, one: ShownToken) -> dict[str, float]:
        """Of two tokens with the same text, the chosen one counts."""
        top = {_as_text(token_bytes): _finite(logprob) for token_bytes, logprob in self._top(one)}
        return top | {_as_text(self._bytes_of(one)): _finite(one.token.logprob)}

    def _other(self, top: tuple[int, float]) -> tuple[bytes, float]:
        return self._vocabulary.token_bytes(top[0]), top[1]

    def _bytes_of(self, one: ShownToken) -> bytes:
        """At the very beginning of a text, a token may have lost its first space."""
        own = self._vocabulary.token_bytes(one.token.token_id)
        return one.text.encode() if one.text and own.endswith(one.text.encode()) else own


def _chat_entry(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _as_text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _as_text(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return _PART_OF_A_CHARACTER + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(logprob: float | None) -> float:
    assert logprob is not None, "the engine was asked for logprobs"
    return max(logprob, LOWEST_LOGPROB)
