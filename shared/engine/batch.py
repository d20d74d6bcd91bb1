"""From a plan to tensors: one flattened run of tokens, without padding.

plan          A: 1 token    B: 1 token    C: 4 tokens of a prompt
token_ids     a             b             c0 c1 c2 c3
query_starts  0             1             2                    6
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.plan import Plan
from shared.kernels.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: Tensor  # [T] int64
    attention: AttentionBatch
    sample_rows: Tensor  # [R] int64: last token of each sequence that samples, in the plan's order


def build_batch(plan: Plan, block_size: int, device: torch.device) -> Batch:
    """The tensors of a plan that schedules at least one token."""
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    starts = np.fromiter((s.start for s in scheduled), np.int64, num_seqs)
    query_lens = np.fromiter((s.num_tokens for s in scheduled), np.int64, num_seqs)
    context_lens = starts + query_lens
    query_starts = np.zeros(num_seqs + 1, np.int64)
    np.cumsum(query_lens, out=query_starts[1:])

    owners = np.repeat(np.arange(num_seqs), query_lens)  # [T] sequence of each token
    positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[owners]
    tables = _block_tables(plan, -(-context_lens // block_size))
    slots = tables[owners, positions // block_size] * np.int64(block_size) + positions % block_size
    sample_rows = [int(end) - 1 for s, end in zip(scheduled, query_starts[1:], strict=True) if s.num_samples]

    attention = AttentionBatch(
        positions=_to(device, positions),
        slots=_to(device, slots),
        query_starts=_to(device, query_starts.astype(np.int32)),
        context_lens=_to(device, context_lens.astype(np.int32)),
        block_tables=_to(device, tables),
        num_single=int((query_lens == 1).sum()),
        max_query_len=int(query_lens.max()),
        max_context_len=int(context_lens.max()),
    )
    assert (query_lens[: attention.num_single] == 1).all(), "sequences with a single token come first"
    return Batch(_to(device, _token_ids(plan)), attention, _to(device, np.array(sample_rows, np.int64)))


def _token_ids(plan: Plan) -> NDArray[np.int64]:
    pieces = (s.sequence.token_ids[s.start : s.start + s.num_tokens] for s in plan.scheduled)
    return np.fromiter(chain.from_iterable(pieces), np.int64, plan.num_tokens)


def _block_tables(plan: Plan, num_blocks: NDArray[np.int64]) -> NDArray[np.int32]:
    """[S, max(num_blocks)]: the first num_blocks[s] blocks of each sequence, then zeros."""
    tables = np.zeros((len(num_blocks), num_blocks.max()), np.int32)
    for row, scheduled, count in zip(tables, plan.scheduled, num_blocks.tolist(), strict=True):
        row[:count] = scheduled.sequence.block_table[:count]
    return tables


def _to(device: torch.device, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
