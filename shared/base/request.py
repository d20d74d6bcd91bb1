"""What is asked of an engine and what it gives back: plain values, no torch, no wire.

A request is a run of token ids. Its first `num_prompt_tokens` are the prompt; any further ones are output that another worker
already produced, so a new request and a continued one are the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shared.base.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_N = 128
_LOWEST_TEMPERATURE = 1e-5  # below it the best token is taken, as in vLLM: to divide by less overflows


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen. Raises InvalidRequest, naming the field, if a value is out of range."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off; 0: the best token alone
    min_p: float = 0.0
    seed: int = 0  # 64 bits; the router draws one for a request that has none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_logprobs: int | None = None  # None: no logprobs; k: of the chosen token and the k best
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    ignored_eos_token_ids: tuple[int, ...] = ()  # end nothing, but cannot be sampled before min_tokens either

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0.0 <= self.top_p <= 1.0, "between 0 and 1")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        _check("seed", self.seed, 0 <= self.seed < 2**64, "a 64-bit unsigned integer")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2.0 <= value <= 2.0, "between -2 and 2")
        _check("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 10.0, "above 0 and at most 10")
        _check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        if self.num_logprobs is not None:
            _check("logprobs", self.num_logprobs, 0 <= self.num_logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100.0 <= bias <= 100.0, "between -100 and 100")
        _check("n", self.n, 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _LOWEST_TEMPERATURE or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's n outputs. Choice 0 keeps the request's own, so that each output can be continued alone
    as a request with n = 1."""
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**64


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:  # NaN fails every comparison and lands here
        raise InvalidRequest(f"{name} is {value!r}; it must be {allowed}", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as an engine takes it."""

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""
    model: str = ""  # served name; a router's affair, engines have one model

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompt_tokens <= len(self.token_ids):
            raise InvalidRequest(
                f"prompt has {self.num_prompt_tokens} of {len(self.token_ids)} tokens; it must have at least 1", param="prompt"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming field and id, for token ids that the model does not have: they would read past its
        embedding, or never be sampled."""
        sampling = self.sampling
        for name, ids in (
            ("prompt", self.token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("ignored_eos_token_ids", sampling.ignored_eos_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
                raise InvalidRequest(f"{name} has token id {wrong}; the model's are between 0 and {vocab_size - 1}", param=name)

    @property
    def num_emitted(self) -> int:
        """Output tokens that are already part of `token_ids`."""
        return len(self.token_ids) - self.num_prompt_tokens


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


# Engines make a Token and an Output for each token of each step. Nobody changes them; making frozen ones takes three times as long.


@dataclass(slots=True)
class Token:
    """One emitted token. `index` is its absolute position in the output, from 0."""

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Output:
    """What a step produced for one choice of a request: consecutive tokens, and how it ended, if it did."""

    request_id: str
    choice: int
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt, found in a prefix cache


def finish_reason(sampling: SamplingParams, token_id: int, index: int) -> FinishReason | None:
    """How the output ends with this token at this index, or None if it goes on. The one place that decides it."""
    if token_id in sampling.stop_token_ids and index + 1 > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if is_last(sampling, index) else None


def is_last(sampling: SamplingParams, index: int) -> bool:
    """Whether the output ends with the token at this index, whatever it is."""
    return index + 1 >= sampling.max_tokens
