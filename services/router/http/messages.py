"""From the messages of a chat to the plain role and text that a chat template takes (services/router/text/chat_template.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.http.schemas import Message
from shared.base.errors import InvalidRequest


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Content is a string or a list of text parts, as the client sent it. Raises InvalidRequest, naming the message, for content
    that is not text."""
    return [_one(message, f"messages[{i}].content") for i, message in enumerate(messages)]


def _one(message: Message, where: str) -> dict[str, Any]:
    plain = {"role": message.role, "content": _content(message, where)}
    return plain if message.name is None else plain | {"name": message.name}


def _content(message: Message, where: str) -> str | list[dict[str, str]]:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and message.role == "assistant":
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts of type text", param=where)
    return [{"type": "text", "text": _part(part, f"{where}[{i}]")} for i, part in enumerate(content)]


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise InvalidRequest(f"{where} has type {kind[:40]!r}; this server takes parts of type text only", param=where)
    if kind is None or not isinstance(text := part.get("text"), str):
        raise InvalidRequest(f'{where} must be {{"type": "text", "text": "…"}}', param=where)
    return text
