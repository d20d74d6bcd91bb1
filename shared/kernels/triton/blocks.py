"""Copy, gather and scatter of whole blocks. A block is one contiguous run of bytes, so all three are one kernel that copies
runs of 4-byte words between indexed places; consecutive words per thread become 16-byte loads and stores."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.triton.launch import Launch, require

WORDS_PER_PROGRAM = 4096  # 16 KiB: eight 16-byte loads in flight per thread


@triton.jit
def copy_runs_kernel(
    source,  # int32 words
    target,
    source_ids,  # None: run i is at place i
    target_ids,
    stride_source_ids,
    stride_target_ids,
    stride_source,  # words between places
    stride_target,
    num_words,  # per run
    TILE: tl.constexpr,
):
    run = tl.program_id(0).to(tl.int64)
    source_place, target_place = run, run
    if source_ids is not None:
        source_place = tl.load(source_ids + run * stride_source_ids)
    if target_ids is not None:
        target_place = tl.load(target_ids + run * stride_target_ids)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    present = word < num_words
    words = tl.load(source + source_place * stride_source + word, mask=present)
    tl.store(target + target_place * stride_target + word, words, mask=present)


def as_words(blocks: Tensor) -> Tensor:
    """[N, ...] of any dtype, each a whole number of words -> [N, words] int32, the same memory."""
    require(blocks[:1].is_contiguous(), "a block must be one contiguous run")
    return blocks.flatten(1).view(torch.int32)


def copy_runs_launch(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, num_runs: int) -> Launch:
    """target[target_ids[i]] = source[source_ids[i]] for i < num_runs; without ids the place is i.

    source, target [N, words] int32 (see `as_words`); ids [num_runs] int64, valid places, no target twice.
    """
    require(source.shape[1] == target.shape[1], f"runs of {source.shape[1]} and {target.shape[1]} words")
    num_words = source.shape[1]
    arguments = {
        "source": source,
        "target": target,
        "source_ids": source_ids,
        "target_ids": target_ids,
        "stride_source_ids": 0 if source_ids is None else source_ids.stride(0),
        "stride_target_ids": 0 if target_ids is None else target_ids.stride(0),
        "stride_source": source.stride(0),
        "stride_target": target.stride(0),
        "num_words": num_words,
        "TILE": WORDS_PER_PROGRAM,
    }
    return Launch(copy_runs_kernel, (num_runs, triton.cdiv(num_words, WORDS_PER_PROGRAM)), arguments, num_warps=4)
