"""From logits to tokens.

    1  log-probabilities of the raw logits, for rows that ask
    2  penalties, bias, masks                         (shared/engine/penalties.py)
    3  repeat rows of sequences that fork into n outputs
    4  temperature, filters, draw                     (Kernels.sample, with counter-based numbers)

Rows whose logits are not finite are refused: a body's kernels may make any token of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.engine.penalties import adjust_logits, needs_adjusting
from shared.engine.plan import SampledToken, ScheduledSequence
from shared.engine.uniform import uniforms
from shared.errors import Internal
from shared.kernels.interface import Kernels, SamplingBatch
from shared.request import SamplingParams, choice_seed


class NotFiniteLogits(Internal):
    """The model gave NaN or infinity for some requests; any token made from that would be garbage."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(f"the model's logits are not finite for request {', '.join(request_ids)}")
        self.request_ids = request_ids


class Sampler:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, scheduled: Sequence[ScheduledSequence]) -> list[list[SampledToken]]:
        """logits [R, V] float32, one row per scheduled sequence with num_samples > 0, in order; may be overwritten. Returns
        num_samples tokens for every scheduled sequence. Raises NotFiniteLogits."""
        rows = [s for s in scheduled if s.num_samples]
        if not rows:
            return [[] for _ in scheduled]
        samples = iter(self._samples(logits, rows))
        return [next(samples) if s.num_samples else [] for s in scheduled]

    def _samples(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[list[SampledToken]]:
        # A row's maximum is NaN if any element is, and infinite if one is +inf or all are -inf.
        largest = logits.amax(-1)
        asking = [i for i, s in enumerate(rows) if s.sequence.request.sampling.num_logprobs is not None]
        raw = logits[torch.tensor(asking, device=logits.device)].log_softmax(-1) if asking else None
        token_ids = self._choose(logits, rows)
        _check_finite(largest, rows)
        samples = [[SampledToken(t) for t in ids] for ids in token_ids]
        if raw is not None:
            for i, tokens in zip(asking, _with_logprobs(raw, [(rows[i], token_ids[i]) for i in asking]), strict=True):
                samples[i] = tokens
        return samples

    def _choose(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[list[int]]:
        """num_samples token ids per row."""
        adjusted = [i for i, s in enumerate(rows) if needs_adjusting(s.sequence)]
        if adjusted:
            index = torch.tensor(adjusted, device=logits.device)
            part = logits[index]
            adjust_logits(part, [rows[i].sequence for i in adjusted])
            logits[index] = part
        counts = [s.num_samples for s in rows]
        if max(counts) > 1:
            logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        chosen = iter(self._kernels.sample(logits, _sampling_batch(rows, logits.device)).tolist())
        return [[next(chosen) for _ in range(count)] for count in counts]


def _check_finite(largest: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """largest [R]: the greatest logit of each row."""
    bad = [s.sequence.id for s, value in zip(rows, largest.tolist(), strict=True) if not math.isfinite(value)]
    if bad:
        raise NotFiniteLogits(bad)


def _sampling_batch(rows: Sequence[ScheduledSequence], device: torch.device) -> SamplingBatch:
    draws = [_Draw(s.sequence.request.sampling, seed, s.start + s.num_tokens) for s in rows for seed in _seeds(s)]
    params = [d.sampling for d in draws]
    floats = np.array([[p.temperature, p.top_p, p.min_p] for p in params], np.float32)
    numbers = uniforms([d.seed for d in draws], [d.position for d in draws])
    temperature, top_p, min_p, drawn = torch.from_numpy(np.concatenate((floats, numbers[:, None]), axis=1).T.copy()).to(device)
    return SamplingBatch(
        temperature=temperature,
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64).to(device),
        top_p=top_p,
        min_p=min_p,
        uniforms=drawn,
        all_greedy=all(p.is_greedy for p in params),
        needs_filter=any(not p.is_greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0) for p in params),
    )


@dataclass(frozen=True, slots=True)
class _Draw:
    sampling: SamplingParams
    seed: int
    position: int  # absolute index of the new token


def _seeds(scheduled: ScheduledSequence) -> list[int]:
    """Of each output that this row is sampled for: all n where the sequence forks, else its own."""
    sequence, seed = scheduled.sequence, scheduled.sequence.request.sampling.seed
    choices = range(scheduled.num_samples) if scheduled.num_samples > 1 else (sequence.choice,)
    return [choice_seed(seed, choice) for choice in choices]


def _with_logprobs(raw: Tensor, chosen: Sequence[tuple[ScheduledSequence, list[int]]]) -> list[list[SampledToken]]:
    """raw [A, V]: log-probabilities of the A rows that ask; chosen: the row's sequence and its sampled ids."""
    wanted = [s.sequence.request.sampling.num_logprobs or 0 for s, _ in chosen]
    top = raw.topk(min(max(wanted), raw.shape[1]), dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    owners = torch.tensor([row for row, (_, ids) in enumerate(chosen) for _ in ids], device=raw.device)
    own = iter(raw[owners, torch.tensor([t for _, ids in chosen for t in ids], device=raw.device)].tolist())
    result = []
    for row, (_, ids) in enumerate(chosen):
        best = tuple(zip(top_ids[row][: wanted[row]], top_values[row][: wanted[row]], strict=True))
        result.append([SampledToken(t, next(own), best) for t in ids])
    return result
