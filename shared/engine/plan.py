"""What the scheduler decides for one step, and what comes back from it. Plain values: no torch, no wire."""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.sequence import Sequence
from shared.errors import TwostrokeError
from shared.request import Output


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens start .. start + num_tokens - 1 of `sequence`, then sample `num_samples` tokens from the last one's logits:
    0 while tokens remain uncomputed, n when the sequence forks into its n outputs, else 1."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step. Sequences with a single token come first. `copies` (source, target) come before the forward pass."""

    scheduled: tuple[ScheduledSequence, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


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
