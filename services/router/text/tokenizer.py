"""The model's tokenizer and chat template, as the router needs them: text to ids, ids to text, and who ends an output.

transformers loads the tokenizer and renders chats; ids and text go through the Rust tokenizer below it, which gives up the
interpreter lock, so that long prompts are tokenized beside the event loop.

Special tokens are read as such in what a chat template wrote, not in what people wrote: `<|im_end|>` inside a message is text, and
cannot end it; where the installed transformers cannot tell them apart yet, such messages are refused. Plain prompts of completions
are read whole, special tokens included, as vLLM does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from services.router.text.chat_template import ChatTemplates, Message
from services.router.text.detokenizer import Detokenizer, new_detokenizer
from services.router.text.loading import ModelFacts, read_template
from services.router.text.vocabulary import Vocabulary
from shared.base.errors import InvalidRequest
from shared.models.locate import locate
from shared.models.tokenizer import load_tokenizer

# Shorter texts (about a millisecond) are rendered and tokenized at once: a thread costs more.
MAX_INLINE_CHARS = 4096
_SANITIZE = "sanitize_control_tokens"  # an option of transformers; one without it would hand it to the template as a variable
_BUILDING = threading.Lock()  # transformers imports its parts as they are asked for, which two threads must not do at once


class ChatTokenizer:
    def __init__(self, tokenizer: Any, facts: ModelFacts, chat_template: str | None = None) -> None:
        """`tokenizer` is a transformers tokenizer on top of `tokenizers`; `chat_template` replaces its own."""
        tokenizer.chat_control_tokens = ()  # special tokens only: `<think>` in a message of the assistant stays a token
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._templates = ChatTemplates(tokenizer, chat_template)
        self._can_sanitize = _SANITIZE in inspect.signature(tokenizer.apply_chat_template).parameters
        self.vocabulary = Vocabulary(self._tokenizer)
        self._special_text = _any_of([token for i in self.vocabulary.special_ids if (token := self.vocabulary.name(i))])
        self.vocab_size: int = facts.vocab_size or len(tokenizer)
        own_eos = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
        self.eos_token_ids = frozenset(i for i in facts.eos_token_ids | own_eos if 0 <= i < self.vocab_size)
        self.sampling_defaults = facts.sampling_defaults

    @classmethod
    def load(
        cls, source: str, revision: str = "", chat_template: str = "", tokenizer: str = "", generation_config: str = "auto"
    ) -> ChatTokenizer:
        """`source` and `tokenizer`: a folder, a .gguf file or a hub id; `chat_template` names a file; `generation_config` "none":
        without the model's sampling defaults. Takes seconds, may run in a thread. Raises ConfigError for what cannot be read."""
        files = locate(source, revision, tokenizer, with_weights=False)
        facts = ModelFacts.of(files, with_sampling_defaults=generation_config != "none")
        template = read_template(chat_template) if chat_template else None
        with _BUILDING:
            return cls(load_tokenizer(files), facts, template)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool, param: str = "prompt") -> list[list[int]]:
        """Token ids of each text. Raises InvalidRequest for a token that the model does not have."""
        if sum(map(len, texts)) <= MAX_INLINE_CHARS:
            encoded = self._encode(texts, add_special_tokens)
        else:
            encoded = await asyncio.to_thread(self._encode, texts, add_special_tokens)
        for token_ids in encoded:
            self._check_encoded(param, token_ids)
        return encoded

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        parse_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of the chat as the model's template writes it. `variables` are the client's; `parse_special_tokens`: also in
        what people wrote. Raises InvalidRequest."""
        said = list(_strings((messages, variables, tools)))
        if parse_special_tokens or not any(map(self._special_text.search, said)):
            chat = (messages, add_generation_prompt, variables, tools)
            is_short = sum(map(len, said)) <= MAX_INLINE_CHARS
            text = self.render_chat(*chat) if is_short else await asyncio.to_thread(self.render_chat, *chat)
            [token_ids] = await self.encode([text], add_special_tokens=False, param="messages")
            return token_ids
        if not self._can_sanitize:
            raise InvalidRequest(
                f"messages hold the special token {self._first_special(said)!r}, which this server cannot read as text",
                param="messages",
            )
        options = {"tokenize": True, "return_dict": False, _SANITIZE: True}
        token_ids = await asyncio.to_thread(self._apply, messages, add_generation_prompt, variables, tools, options)
        self._check_encoded("messages", token_ids)
        return token_ids

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The chat's text. Raises InvalidRequest."""
        text: str = self._apply(messages, add_generation_prompt, variables, tools, {"tokenize": False})
        return text

    def _apply(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> Any:
        template = self._templates.choose(has_tools=bool(tools))
        self._templates.check_variables(variables)
        return self._templates.apply(
            template,
            template.adapt(messages),
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) or None,
            **options,
            **variables,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text, special tokens included."""
        return self.vocabulary.decode(token_ids)

    def new_detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """For one output of a prompt."""
        return new_detokenizer(self.vocabulary, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def special_token_ids(self, texts: Collection[str]) -> frozenset[int]:
        """Those of the texts that are a special token."""
        return frozenset(i for text in texts if (i := self.vocabulary.special_id(text)) is not None and i < self.vocab_size)

    def _first_special(self, texts: Sequence[str]) -> str:
        return next(match[0] for text in texts if (match := self._special_text.search(text)))

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _check_encoded(self, param: str, token_ids: Sequence[int]) -> None:
        """A tokenizer may have tokens that were added after the model was made."""
        if self.vocabulary.max_id < self.vocab_size:
            return
        unknown = next((token_id for token_id in token_ids if token_id >= self.vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"{param} holds the token {self.vocabulary.name(unknown)!r} (id {unknown}), which the model does not have; its "
                f"token ids are between 0 and {self.vocab_size - 1}",
                param=param,
            )


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Finds where any of the texts begins. Common beginnings are factored out: tried one by one, the 250 special tokens of Llama 3
    would block the loop for a second where a body of 4 MB is made of their beginnings."""
    return re.compile(_alternatives(texts) if texts else "(?!)")


def _alternatives(texts: Collection[str]) -> str:
    prefix = os.path.commonprefix(list(texts))  # noqa: RUF071 - by characters is what is meant
    if prefix in texts:
        return re.escape(prefix)
    by_char: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        rest = text[len(prefix) :]
        by_char[rest[0]].append(rest)
    return f"{re.escape(prefix)}(?:{'|'.join(map(_alternatives, by_char.values()))})"


def _strings(value: Any) -> Iterator[str]:
    """All strings of a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)
