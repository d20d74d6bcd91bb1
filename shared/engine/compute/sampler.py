"""From logits to tokens.

    1  log-probabilities of the raw logits, for rows that ask
    2  masks, bias, penalties                         (shared/engine/compute/penalties.py)
    3  repeat rows of sequences that fork into n outputs
    4  temperature, filters, draw                     (Kernels.sample, with counter-based numbers)

Rows whose logits are not finite, from the model on or after being penalized and divided by the temperature, are refused: a backend
may make any token of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.base.errors import Internal
from shared.base.request import choice_seed
from shared.engine.compute.penalties import adjust_logits, needs_adjusting
from shared.engine.compute.staging import Fence, to_device, to_host
from shared.engine.compute.uniform import uniforms
from shared.engine.schedule.plan import SampledToken, ScheduledSequence
from shared.kernels.interface import Kernels, SamplingBatch

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class NotFiniteLogits(Internal):
    """NaN or infinity for some requests, by the model or by a penalty or temperature; any token made from that would be garbage."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(f"the logits are not finite for request {', '.join(request_ids)}")
        self.request_ids = request_ids


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """In main memory, for the A of a step's rows that ask and the N tokens that these sample."""

    rows: Sequence[int]  # [A] which rows of the step
    own: Tensor  # [N] of the sampled tokens
    top_values: Tensor  # [A, k] of the best tokens
    top_ids: Tensor  # [A, k]


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens of a step. On a GPU they may still be on their way."""

    scheduled: Sequence[ScheduledSequence]
    token_ids: Tensor  # [N] int64, on the device: num_samples of each sequence, in the plan's order
    known_token_ids: Tensor  # [N], in main memory, once the fence is passed
    largest: Tensor  # [R], main memory: greatest adjusted logit of each row; NaN if any is, infinite if one is or none is finite
    logprobs: _Logprobs | None
    fence: Fence

    def is_done(self) -> bool:
        return self.fence.is_passed()

    def wait(self) -> list[list[SampledToken]]:
        """num_samples tokens for every scheduled sequence. Raises NotFiniteLogits."""
        self.fence.wait()
        rows = [s for s in self.scheduled if s.num_samples]
        bad = [s.sequence.id for s, value in zip(rows, self.largest.tolist(), strict=True) if not _is_usable(value, s)]
        if bad:
            raise NotFiniteLogits(bad)
        tokens = iter([SampledToken(token_id) for token_id in self.known_token_ids.tolist()])
        samples = [[next(tokens) for _ in range(s.num_samples)] for s in self.scheduled]
        if self.logprobs is not None:
            _attach(self.logprobs, rows, [tokens for tokens in samples if tokens])
        return samples


class Sampler:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def launch(self, logits: Tensor, scheduled: Sequence[ScheduledSequence]) -> Samples:
        """logits [R, V] float32, one row per scheduled sequence with num_samples > 0, in order; may be overwritten."""
        rows = [s for s in scheduled if s.num_samples]
        asking = [i for i, s in enumerate(rows) if s.sequence.request.sampling.num_logprobs is not None]
        raw = logits[_index(asking, logits.device)].log_softmax(-1) if asking else None
        _adjust(logits, rows)
        largest = to_host(logits.amax(-1))
        token_ids = self._choose(logits, rows)
        logprobs = None if raw is None else _logprobs(raw, token_ids, rows, asking)
        return Samples(scheduled, token_ids, to_host(token_ids), largest, logprobs, Fence(logits.device))

    def _choose(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor:
        """[N]: num_samples token ids for each row."""
        if not rows:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        owners = _owners(rows)
        if len(owners) > len(rows):
            logits = logits[_index(owners, logits.device)]
        token_ids = self._kernels.sample(logits, _sampling_batch(rows, logits.device))
        # Of logits that are not finite any number may come, and it is used as an index before it is refused.
        return token_ids.clamp_(0, logits.shape[1] - 1)


def _adjust(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """In place, the rows that ask for it."""
    adjusted = [i for i, s in enumerate(rows) if needs_adjusting(s)]
    if adjusted:
        index = _index(adjusted, logits.device)
        part = logits[index]
        adjust_logits(part, [rows[i] for i in adjusted])
        logits[index] = part


def _is_usable(largest: float, scheduled: ScheduledSequence) -> bool:
    """Whether a row's greatest logit is a number, also after the division by its temperature. NaN fails the comparison."""
    sampling = scheduled.sequence.request.sampling
    return abs(largest) <= _LARGEST_FLOAT32 * (1.0 if sampling.is_greedy else min(sampling.temperature, 1.0))


def _owners(rows: Sequence[ScheduledSequence]) -> list[int]:
    """[N]: the row of each sampled token."""
    return [i for i, s in enumerate(rows) for _ in range(s.num_samples)]


def _sampling_batch(rows: Sequence[ScheduledSequence], device: torch.device) -> SamplingBatch:
    params, seeds, positions = [], [], []
    for s in rows:
        for choice in _choices(s):
            params.append(s.sequence.request.sampling)
            seeds.append(choice_seed(params[-1].seed, choice))
            positions.append(s.end)
    columns = np.empty((4, len(params)), np.float32)
    columns[:3] = np.array([(0.0 if p.is_greedy else p.temperature, p.top_p, p.min_p) for p in params]).T
    columns[3] = uniforms(seeds, positions)
    temperature, top_p, min_p, drawn = to_device(columns, device)
    return SamplingBatch(
        temperature=temperature,
        top_k=_index([p.top_k for p in params], device),
        top_p=top_p,
        min_p=min_p,
        uniforms=drawn,
        all_greedy=all(p.is_greedy for p in params),
        needs_filter=any(not p.is_greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params),
    )


def _choices(scheduled: ScheduledSequence) -> Sequence[int]:
    """The outputs that this row is sampled for: all n where the sequence forks, else its own."""
    return range(scheduled.num_samples) if scheduled.num_samples > 1 else (scheduled.sequence.choice,)


def _logprobs(raw: Tensor, token_ids: Tensor, rows: Sequence[ScheduledSequence], asking: Sequence[int]) -> _Logprobs:
    """raw [A, V]: log-probabilities of the rows that ask; token_ids [N] of all rows."""
    place = {row: i for i, row in enumerate(asking)}
    wanted = [(place[row], n) for n, row in enumerate(_owners(rows)) if row in place]
    index = _index([i for i, _ in wanted], raw.device), token_ids[_index([n for _, n in wanted], raw.device)]
    top = raw.topk(min(max(_num_logprobs(rows[row]) for row in asking), raw.shape[1]), dim=-1)
    return _Logprobs(asking, to_host(raw[index]), to_host(top.values), to_host(top.indices))


def _attach(logprobs: _Logprobs, rows: Sequence[ScheduledSequence], samples: Sequence[Sequence[SampledToken]]) -> None:
    """To the tokens sampled for each row."""
    own = iter(logprobs.own.tolist())
    for row, ids, values in zip(logprobs.rows, logprobs.top_ids.tolist(), logprobs.top_values.tolist(), strict=True):
        count = _num_logprobs(rows[row])
        best = tuple(zip(ids[:count], values[:count], strict=True))
        for token in samples[row]:
            token.logprob, token.top_logprobs = next(own), best


def _num_logprobs(scheduled: ScheduledSequence) -> int:
    return scheduled.sequence.request.sampling.num_logprobs or 0


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, np.int64), device)
