"""What the scheduler decides for one step, and what comes back from it. Plain values: no torch, no wire.

What there is one of for each token of each step is not frozen: making a frozen object takes three times as long. It is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Protocol

from shared.base.errors import TwostrokeError
from shared.base.request import Output
from shared.engine.schedule.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Compute tokens start .. start + num_tokens - 1 of `sequence`, then sample `num_samples` tokens from the last one's logits:
    0 while tokens remain uncomputed, n when the sequence forks into its n outputs, else 1."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int

    @classmethod
    def next_of(cls, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """The next `num_tokens` tokens that the sequence lacks; it samples if it lacks no more."""
        num_samples = 0
        if num_tokens == sequence.num_uncomputed_tokens:
            num_samples = sequence.request.sampling.n if sequence.is_forking else 1
        return cls(sequence, sequence.num_computed_tokens, num_tokens, num_samples)

    @property
    def end(self) -> int:
        """Position after the last computed token: that of the sampled one."""
        return self.start + self.num_tokens

    @property
    def sample_index(self) -> int:
        """Index of the sampled token in the output."""
        return self.end - self.sequence.request.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step. Sequences with a single token come first. `copies` (source, target) come before the forward pass.
    `outputs` are first tokens, to be passed on at once: of sequences that were handed over and have a seat from this step on.

    A plan made ahead has `sampled_rows`: its sequences compute one token each, which the plan before it samples. That plan samples
    one for each of its own sequences; sampled_rows[i] says which of them is `scheduled[i]`.
    """

    scheduled: tuple[ScheduledSequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    sampled_rows: tuple[int, ...] | None = None
    outputs: tuple[Output, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Pending(Protocol):
    """A step that has been launched. A device may still be at it."""

    def is_done(self) -> bool: ...

    def wait(self) -> Row[Row[SampledToken]]:
        """Per scheduled sequence, its `num_samples` tokens. Raises what went wrong in the step."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A held sequence's prompt is computed up to here: its blocks before this token may be shipped; with `num_layers`, only that
    many of their layers, while the step computes the others."""

    request_id: str
    num_computed_tokens: int
    num_layers: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The request ended without a result; its blocks are free."""

    request_id: str
    error: TwostrokeError


Event = Output | Progress | Failure
