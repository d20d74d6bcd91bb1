"""Which chat template a chat is written with, and in what form the template takes its messages.

A model has one template or several named ones; with tools, `tool_use` is used if there is one. The form is found out by rendering
small chats when the template is loaded:

- content as a string, or (if a string does not show) as a list of parts;
- messages of role developer (if it writes them otherwise than a made-up role's), or system messages in their place;
- system messages anywhere, or only one at the head (several are then merged there), or none: they are then refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from shared.base.errors import InvalidRequest

Message = Mapping[str, Any]  # role, content (a string or a list of text parts), perhaps name
Talk = Sequence[tuple[str, str]]  # roles and what they say
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_SHORT_TALK = [("user", "u0")]
_TALK_WITH_SYSTEM = [("system", "s0"), ("user", "u0")]
_TALK_WITH_DEVELOPER = [("developer", "d0"), ("user", "u0")]
_TALK_WITH_LATE_SYSTEM = [("system", "s0"), ("user", "u0"), ("assistant", "a0"), ("system", "s1"), ("user", "u1")]
_PART_SEPARATOR, _SYSTEM_SEPARATOR = "\n", "\n\n"


@dataclass(frozen=True, slots=True)
class Template:
    source: str
    takes_parts: bool
    takes_developer: bool
    takes_systems: bool
    takes_late_systems: bool

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that this template takes. Raises InvalidRequest for system messages where it takes none."""
        adapted = [self._adapt_one(message) for message in messages]
        systems = [message for message in adapted if message["role"] == "system"]
        if systems and not self.takes_systems:
            raise InvalidRequest("the model's chat template takes no system messages", param="messages")
        is_usual = adapted[: len(systems)] == systems and len(systems) <= 1
        if self.takes_late_systems or is_usual:
            return adapted
        merged = {"role": "system", "content": self._content(_SYSTEM_SEPARATOR.join(_text(m["content"]) for m in systems))}
        return [merged, *(message for message in adapted if message["role"] != "system")]

    def _adapt_one(self, message: Message) -> Message:
        is_renamed = message["role"] == "developer" and not self.takes_developer
        role = "system" if is_renamed else message["role"]
        return {**message, "role": role, "content": self._content(message["content"])}

    def _content(self, content: Any) -> Any:
        """One part at most: of several, a template that writes nothing between them could make a special token."""
        return _as_part(_text(content)) if self.takes_parts else _text(content)


def _as_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else _PART_SEPARATOR.join(part["text"] for part in content)


class ChatTemplates:
    def __init__(self, tokenizer: Any, override: str | None = None) -> None:
        """`tokenizer` is transformers', which renders; `override` replaces its templates."""
        self._tokenizer = tokenizer
        own = override or tokenizer.chat_template or {}
        sources: dict[str, str] = own if isinstance(own, dict) else {_DEFAULT: own}
        self._templates = {name: self._examine(source) for name, source in sources.items()}
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}

    def choose(self, has_tools: bool = False) -> Template:
        """Raises InvalidRequest if the model has none."""
        names = (_WITH_TOOLS, _DEFAULT) if has_tools else (_DEFAULT,)
        found = next((self._templates[name] for name in names if name in self._templates), None)
        if found is None and len(self._templates) == 1:
            [found] = self._templates.values()
        if found is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return found

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises InvalidRequest for one that would replace what the template or the renderer itself takes."""
        for name in variables:
            if name in self._reserved:
                raise InvalidRequest(f"chat_template_kwargs cannot set {name!r}", param="chat_template_kwargs")

    def apply(self, template: Template, messages: Sequence[Message], **options: Any) -> Any:
        """What transformers' `apply_chat_template` gives with these options. Raises InvalidRequest."""
        try:
            return self._tokenizer.apply_chat_template(list(messages), chat_template=template.source, **options)
        except (TemplateError, TypeError, ValueError) as error:  # templates refuse roles and orders they do not know
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from None

    def _examine(self, source: str) -> Template:
        takes_parts = not self._shows(source, _SHORT_TALK, False) and self._shows(source, _SHORT_TALK, True)
        return Template(
            source,
            takes_parts,
            takes_developer=self._knows_developer(source, takes_parts),
            takes_systems=self._shows(source, _TALK_WITH_SYSTEM, takes_parts),
            takes_late_systems=self._shows(source, _TALK_WITH_LATE_SYSTEM, takes_parts),
        )

    def _shows(self, source: str, talk: Talk, in_parts: bool) -> bool:
        """Whether all that is said is in the rendered chat, in its order."""
        text = self._render(source, talk, in_parts)
        position = 0
        for _, content in talk:
            position = -1 if text is None else text.find(content, position)
            if position < 0:
                return False
        return True

    def _knows_developer(self, source: str, in_parts: bool) -> bool:
        """A template that takes any role, or ignores roles, writes a made-up one in the same way."""
        if not self._shows(source, _TALK_WITH_DEVELOPER, in_parts):
            return False
        made_up = self._render(source, [("nobody", "d0"), ("user", "u0")], in_parts)
        return made_up is None or made_up.replace("nobody", "developer") != self._render(source, _TALK_WITH_DEVELOPER, in_parts)

    def _render(self, source: str, talk: Talk, in_parts: bool) -> str | None:
        """None where the template refuses."""
        messages = [{"role": role, "content": _as_part(text) if in_parts else text} for role, text in talk]
        try:
            text: str = self._tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
        except Exception:  # a template may fail in any way on what it was not written for
            return None
        return text
