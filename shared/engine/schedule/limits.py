"""How much one worker serves at most, and what it refuses for that: at its start, and of a request."""

from __future__ import annotations

from dataclasses import dataclass

from shared.base.errors import ConfigError, InvalidRequest
from shared.engine.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int  # in a step
    max_num_batched_tokens: int  # in a step
    max_model_len: int  # of a sequence, prompt and output

    def check_pool(self, num_tokens: int) -> None:
        """Raises ConfigError if the limits do not fit each other or a KV pool of so many tokens."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; it must be at least --max-num-seqs "
                f"({self.max_num_seqs}), so that every running sequence can get its next token in each step"
            )
        if self.max_model_len > num_tokens:
            raise ConfigError(
                f"--max-model-len is {self.max_model_len}, but the KV pool holds {num_tokens} tokens; lower it, "
                "or raise --num-blocks or the memory for KV"
            )

    def check_sequence(self, sequence: Sequence) -> None:
        """Raises InvalidRequest, naming the parameter, if the sequence can never be served."""
        num_tokens, sampling = sequence.num_tokens, sequence.request.sampling
        if num_tokens >= self.max_model_len:
            raise InvalidRequest(
                f"prompt has {num_tokens} tokens; it must have fewer than {self.max_model_len}, the longest sequence served, "
                "to leave room for output",
                param="prompt",
            )
        if sampling.n > self.max_num_seqs:
            raise InvalidRequest(f"n is {sampling.n}; it must be at most {self.max_num_seqs} here", param="n")
        if sequence.request.num_emitted >= sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {sampling.max_tokens}, but {sequence.request.num_emitted} output tokens exist already",
                param="max_tokens",
            )
