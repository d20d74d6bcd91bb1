"""The bodies that clients send, checked field by field.

A field that would change the answer and is not known or not implemented is refused by name. A field that is null is a field not
sent. pydantic checks types and lengths; ranges of sampling values are checked by `SamplingParams`, where the engine relies on them.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from services.router.http import limits
from services.router.text.sampling_defaults import SamplingDefaults
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import InvalidRequest
from shared.base.request import MAX_LOGPROBS, SamplingParams

B = TypeVar("B", bound="Body")

RANDOM_SEED = -1  # other servers' way to ask for one


class Body(BaseModel):
    """A JSON object from a client."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    ignored: ClassVar[frozenset[str]] = frozenset()
    # Fields without implementation, and those of their values that change nothing and may therefore be sent.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_no_op_fields(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if len(raw) > limits.MAX_FIELDS:
            raise InvalidRequest(f"an object of the request has {len(raw)} fields; at most {limits.MAX_FIELDS} are allowed")
        kept = {name: value for name, value in raw.items() if value is not None and name not in cls.ignored}
        for name, harmless in cls.unsupported.items():
            if name in kept and (value := kept.pop(name)) not in harmless:
                raise InvalidRequest(f"{name} is {reprlib.repr(value)}; this server does not support {name}", param=name)
        return kept


def parse(kind: type[B], body: bytes) -> B:
    """Raises InvalidRequest, naming the field at fault."""
    try:
        return kind.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _invalid(first["type"], first["loc"], first["msg"], first["input"]) from None


def _invalid(kind: str, location: tuple[int | str, ...], message: str, value: object) -> InvalidRequest:
    if not location:
        return InvalidRequest(f"the request body must be a JSON object, not {reprlib.repr(value)}")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    if kind == "extra_forbidden":
        return InvalidRequest(f"this server does not know the field {param}", param=param)
    if kind == "missing":
        return InvalidRequest(f"{param} is missing", param=param)
    return InvalidRequest(f"{param} is {reprlib.repr(value)}; {message[:1].lower()}{message[1:]}", param=param)


class StreamOptions(Body):
    include_usage: bool = False


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS, fail_fast=True), BeforeValidator(_as_list)]


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    ignored = frozenset(
        {
            "user",
            "store",
            "metadata",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "parallel_tool_calls",
        }
    )

    model: str = ""  # the only one
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    # These five: None is the model's default.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[str, Any] = Field(default={}, max_length=limits.MAX_LOGIT_BIASES)  # to numbers; checked below
    stop: StopStrings = []  # or one string
    stop_token_ids: list[int] = Field(default=[], max_length=limits.MAX_STOP_TOKEN_IDS, fail_fast=True)
    min_tokens: int = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str = Field(default="", max_length=256)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given and stream is not true; it is for streams only", param="stream_options")
        return self

    def sampling(self, max_tokens: int, num_logprobs: int | None, tokenizer: ChatTokenizer) -> SamplingParams:
        """Draws a seed if the request has none. Raises InvalidRequest."""
        return SamplingParams(
            max_tokens=max_tokens,
            **self._filters(tokenizer.sampling_defaults).normalized(),
            seed=secrets.randbits(64) if self.seed in (None, RANDOM_SEED) else _as_uint64(self.seed),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop_token_ids=self._stop_token_ids(tokenizer),
            min_tokens=self.min_tokens,
            num_logprobs=num_logprobs,
            logit_bias=self._logit_bias(tokenizer.vocab_size),
            n=self.n,
            ignored_eos_token_ids=tuple(sorted(tokenizer.eos_token_ids)) if self.ignore_eos and self.min_tokens else (),
        )

    def _filters(self, defaults: SamplingDefaults) -> SamplingDefaults:
        names = (one.name for one in fields(SamplingDefaults))
        return replace(defaults, **{name: value for name in names if (value := getattr(self, name)) is not None})

    def _stop_token_ids(self, tokenizer: ChatTokenizer) -> tuple[int, ...]:
        """A stop string that is a special token is a stop token, too: its text may be hidden."""
        limits.check_token_ids("stop_token_ids", self.stop_token_ids, tokenizer.vocab_size)
        ends = frozenset() if self.ignore_eos else tokenizer.eos_token_ids
        return tuple(sorted(ends | frozenset(self.stop_token_ids) | tokenizer.special_token_ids(self.stop)))

    def _logit_bias(self, vocab_size: int) -> dict[int, float]:
        try:
            biases = {int(token_id): float(bias) for token_id, bias in self.logit_bias.items()}
        except (TypeError, ValueError):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias") from None
        limits.check_token_ids("logit_bias", biases, vocab_size)
        return biases


class CompletionBody(GenerationBody):
    unsupported = {"best_of": (1,), "suffix": ("",)}

    prompt: Any  # its four forms are told apart in prompts.py
    max_tokens: int | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False


class Message(Body):
    ignored = frozenset({"annotations"})
    unsupported = {"tool_calls": ([],), "function_call": (), "audio": (), "refusal": (), "tool_call_id": ()}

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None  # its forms are told apart in messages.py
    name: str | None = None


class ChatBody(GenerationBody):
    unsupported = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def max_output_tokens(self) -> int | None:
        """Under either of its names. Raises InvalidRequest if both are given and differ."""
        if self.max_tokens is None or self.max_completion_tokens in (None, self.max_tokens):
            return self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        raise InvalidRequest(
            f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; they mean the same",
            param="max_completion_tokens",
        )

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}; it needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else None


class TokenizeBody(Body):
    model: str = ""  # the only one
    prompt: str | None = None
    messages: list[Message] = Field(default=[], max_length=limits.MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = None  # default: true for a prompt, false for a chat, whose template writes them
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeBody(Body):
    model: str = ""  # the only one
    tokens: list[int] = Field(fail_fast=True)


def _as_uint64(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest(f"seed is {seed}; it must have at most 64 bits", param="seed")
    return seed % 2**64
