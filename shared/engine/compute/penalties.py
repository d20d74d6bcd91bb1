"""What changes logits before sampling, for the rows of a step that ask for it.

In this order, which is vLLM's: a mask on stop tokens, and on end tokens that are ignored, while fewer than
min_tokens are out; logit bias; repetition penalty (Keskar et
al. 2019, CTRL) over prompt and output; presence and frequency penalty over the output, as OpenAI defines them.

Each kind is one list of (row, token id, value) for the whole step and one operation on the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.compute.staging import to_device
from shared.engine.schedule.plan import ScheduledSequence


def needs_adjusting(scheduled: ScheduledSequence) -> bool:
    sampling = scheduled.sequence.request.sampling
    return sampling.has_penalties or bool(sampling.logit_bias) or _is_stop_masked(scheduled)


def adjust_logits(logits: Tensor, rows: Sequence[ScheduledSequence]) -> None:
    """Changes logits [N, V] float32 in place; row i belongs to rows[i]. Biased or stop ids outside the vocabulary can never be
    sampled and are passed over."""
    vocab_size = logits.shape[1]
    biased, repeated, penalized = _Entries(vocab_size), _Entries(vocab_size), _Entries(vocab_size)
    for row, scheduled in enumerate(rows):
        sequence, sampling = scheduled.sequence, scheduled.sequence.request.sampling
        if _is_stop_masked(scheduled):
            biased.add(row, np.unique(np.array(sampling.stop_token_ids + sampling.ignored_eos_token_ids)), -np.inf)
        if sampling.logit_bias:
            biased.add(row, np.array(list(sampling.logit_bias)), np.array(list(sampling.logit_bias.values())))
        if sampling.repetition_penalty != 1.0:
            repeated.add(row, np.unique(np.array(sequence.token_ids)), sampling.repetition_penalty)
        if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            ids, counts = np.unique(np.array(sequence.token_ids[sequence.request.num_prompt_tokens :]), return_counts=True)
            penalized.add(row, ids, -sampling.presence_penalty - sampling.frequency_penalty * counts)

    _add(logits, biased)
    if repeated:
        where, penalty = repeated.tensors(logits.device)
        score = logits[where]
        logits[where] = torch.where(score > 0, score / penalty, score * penalty)
    _add(logits, penalized)


def _add(logits: Tensor, entries: _Entries) -> None:
    if entries:
        where, value = entries.tensors(logits.device)
        logits.index_put_(where, value, accumulate=True)


def _is_stop_masked(scheduled: ScheduledSequence) -> bool:
    """Goes by the plan, because the token before may not be known yet."""
    sampling = scheduled.sequence.request.sampling
    return scheduled.sample_index < sampling.min_tokens and bool(sampling.stop_token_ids or sampling.ignored_eos_token_ids)


class _Entries:
    """Triples (row, token id, value) of a step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, row: int, ids: NDArray[Any], values: NDArray[Any] | float) -> None:
        ids = ids.astype(np.int64)
        known = (ids >= 0) & (ids < self._vocab_size)
        ids, values = ids[known], np.broadcast_to(values, known.shape)[known]
        self._parts.append((np.full(len(ids), row), ids, values.astype(np.float32)))

    def tensors(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """((rows, ids), values), flat."""
        rows, ids, values = (to_device(np.concatenate(column), device) for column in zip(*self._parts, strict=True))
        return (rows, ids), values
