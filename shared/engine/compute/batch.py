"""From a plan to tensors: one flattened run of tokens, without padding.

plan          A: 1 token    B: 1 token    C: 4 tokens of a prompt
token_ids     a             b             c0 c1 c2 c3
query_starts  0             1             2                    6
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.base.blocks_of import num_blocks_of
from shared.engine.compute.staging import to_device
from shared.engine.schedule.plan import Plan
from shared.kernels.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a step's tokens and their keys are, in main memory. S sequences, T tokens, all types as in `AttentionBatch`."""

    positions: NDArray[np.int64]  # [T]
    slots: NDArray[np.int64]  # [T]
    query_starts: NDArray[np.int32]  # [S + 1]
    context_lens: NDArray[np.int32]  # [S]
    block_tables: NDArray[np.int32]  # [S, most blocks of a sequence]
    query_lens: NDArray[np.int64]  # [S]


@dataclass(frozen=True, slots=True)
class Batch:
    attention: AttentionBatch
    sample_rows: Tensor  # [R] int64: last token of each sequence that samples, in the plan's order


def lay_out(plan: Plan, block_size: int) -> Layout:
    """Of a plan that schedules at least one token."""
    scheduled = plan.scheduled
    num_seqs = len(scheduled)
    starts = np.fromiter((s.start for s in scheduled), np.int64, num_seqs)
    query_lens = np.fromiter((s.num_tokens for s in scheduled), np.int64, num_seqs)
    context_lens = starts + query_lens
    query_starts = np.zeros(num_seqs + 1, np.int64)
    np.cumsum(query_lens, out=query_starts[1:])

    owners = np.repeat(np.arange(num_seqs), query_lens)  # [T] sequence of each token
    positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[owners]
    tables = _block_tables(plan, num_blocks_of(context_lens, block_size))
    slots = tables[owners, positions // block_size] * np.int64(block_size) + positions % block_size
    return Layout(positions, slots, query_starts.astype(np.int32), context_lens.astype(np.int32), tables, query_lens)


def build_batch(plan: Plan, block_size: int, device: torch.device) -> Batch:
    """The tensors of a plan that schedules at least one token."""
    layout = lay_out(plan, block_size)
    sample_rows = [int(end) - 1 for s, end in zip(plan.scheduled, layout.query_starts[1:], strict=True) if s.num_samples]
    attention = AttentionBatch(
        positions=to_device(layout.positions, device),
        slots=to_device(layout.slots, device),
        query_starts=to_device(layout.query_starts, device),
        context_lens=to_device(layout.context_lens, device),
        block_tables=to_device(layout.block_tables, device),
        num_single=int((layout.query_lens == 1).sum()),
        max_query_len=int(layout.query_lens.max()),
        max_context_len=int(layout.context_lens.max()),
    )
    assert (layout.query_lens[: attention.num_single] == 1).all(), "sequences with a single token come first"
    return Batch(attention, to_device(np.array(sample_rows, np.int64), device))


def known_token_ids(plan: Plan) -> NDArray[np.int64]:
    """[T]: the tokens of a plan that was not made ahead."""
    pieces = (s.sequence.token_ids[s.start : s.end] for s in plan.scheduled)
    return np.fromiter(chain.from_iterable(pieces), np.int64, plan.num_tokens)


def _block_tables(plan: Plan, num_blocks: NDArray[np.int64]) -> NDArray[np.int32]:
    """[S, max(num_blocks)]: the first num_blocks[s] blocks of each sequence, then zeros."""
    tables = np.zeros((len(num_blocks), num_blocks.max()), np.int32)
    for row, scheduled, count in zip(tables, plan.scheduled, num_blocks.tolist(), strict=True):
        row[:count] = scheduled.sequence.block_table[:count]
    return tables
