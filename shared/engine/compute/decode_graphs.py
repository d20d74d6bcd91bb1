"""Decode steps as CUDA graphs: one call launches what would be hundreds of kernels, so a step is as fast as the device, not Python.

    load    one graph for each batch size of a ladder    1  2  4  8  16  24 .. 64  80 .. 256  288 ..   up to --max-num-seqs
    step    5 sequences, each with one token             5 rows and 3 of padding in the graph for 8

A graph is a recording of launches with their addresses and numbers. So all that differs between steps is in tensors that stay
where they are: token ids, positions, slots, context lengths and block tables go in there, logits come out there. What the launches
take as arguments depends on the batch size and the longest possible context; the true contexts are read on the device.

A row of padding is token 0 at position 0. Its K and V go to the null block, number 0; it sees no keys, and its logits are
not read. All rows of a replay are written before it, padding included: a row left from an earlier step would write to a block
that may have another owner by now.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.base.blocks_of import num_blocks_of
from shared.engine.compute.batch import lay_out
from shared.engine.compute.staging import copy_in
from shared.engine.memory.kv_pool import KvPool
from shared.engine.schedule.plan import Plan
from shared.kernels.interface import AttentionBatch
from shared.models.decoder import Decoder
from shared.process.readiness import notify_progress

log = logging.getLogger(__name__)

# Takes work that is always the same, and returns what repeats it.
Capture = Callable[[Callable[[], None]], Callable[[], None]]

# (up to this batch size, in steps of): padding costs little beside what a batch of such a size costs anyway, and so does the load.
_LADDER_STEPS = ((64, 8), (256, 16), (1 << 20, 32))


def ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes to capture, ascending; the last one is max_num_seqs."""
    sizes = [1, 2, 4, 8]
    for end, step in _LADDER_STEPS:
        sizes += range(sizes[-1] + step, min(end, max_num_seqs) + 1, step)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Forward pass and logits of steps in which each sequence has one token and samples.

    `batch_sizes` ascending. Used by one thread at a time.
    """

    def __init__(self, model: Decoder, pool: KvPool, max_model_len: int, batch_sizes: Sequence[int], capture: Capture) -> None:
        self._model = model
        self._layers = pool.layers
        self._block_size = pool.geometry.block_size
        self._batch_sizes = batch_sizes
        largest, device = batch_sizes[-1], pool.device
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.zeros(largest, dtype=torch.int64, device=device)
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(largest, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(largest, num_blocks_of(max_model_len, self._block_size), dtype=torch.int32, device=device)
        self._logits = torch.zeros(largest, model.config.vocab_size, dtype=torch.float32, device=device)
        # The largest first: the others then find all the memory they need in what it left.
        self._replays = {size: self._capture(size, capture) for size in reversed(batch_sizes)}

    def can_run(self, plan: Plan) -> bool:
        scheduled = plan.scheduled
        return len(scheduled) <= self._batch_sizes[-1] and all(s.num_tokens == 1 and s.num_samples for s in scheduled)

    def run(self, plan: Plan, token_ids: Tensor) -> Tensor:
        """Logits [S, V] float32 of the plan's sequences, whose tokens are token_ids [S] int64. Valid until the next run; may be
        overwritten."""
        return self.replay(self.fill(plan, token_ids))[: len(plan.scheduled)]

    @torch.inference_mode()
    def fill(self, plan: Plan, token_ids: Tensor) -> int:
        """Puts a step's values where its graph reads them; returns the graph's batch size."""
        num_seqs = len(plan.scheduled)
        size = self._batch_sizes[bisect_left(self._batch_sizes, num_seqs)]
        layout = lay_out(plan, self._block_size)
        self._token_ids[:num_seqs].copy_(token_ids)
        self._token_ids[num_seqs:size].zero_()
        for buffer, rows in (
            (self._positions, layout.positions),
            (self._slots, layout.slots),
            (self._context_lens, layout.context_lens),
            (self._block_tables[:, : layout.block_tables.shape[1]], layout.block_tables),
        ):
            copy_in(buffer[:size], _padded(rows, size))
        return size

    def replay(self, size: int) -> Tensor:
        """Logits [size, V] of what `fill` put there."""
        self._replays[size]()
        return self._logits[:size]

    def _capture(self, size: int, capture: Capture) -> Callable[[], None]:
        notify_progress(f"capturing the decode step for {size} sequences")
        batch = AttentionBatch(
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            num_single=size,
            max_query_len=1,
            max_context_len=self._block_tables.shape[1] * self._block_size,
        )
        return capture(partial(self._step, size, batch))

    @torch.inference_mode()
    def _step(self, size: int, batch: AttentionBatch) -> None:
        hidden = self._model.forward(self._token_ids[:size], self._layers, batch)
        self._model.logits(hidden, out=self._logits[:size])


def capture_ladder(model: Decoder, pool: KvPool, max_model_len: int, max_num_seqs: int) -> DecodeGraphs:
    """On a GPU, with kernels that can be captured."""
    sizes, start_s = ladder(max_num_seqs), time.monotonic()
    graphs = DecodeGraphs(model, pool, max_model_len, sizes, CudaCapture())
    log.info(
        "captured %d CUDA graphs of decode steps of up to %d sequences in %.1f s", len(sizes), sizes[-1], time.monotonic() - start_s
    )
    return graphs


def graphs_bytes(model: Decoder, pool: KvPool, max_model_len: int, max_num_seqs: int) -> int:
    """GPU memory that `capture_ladder` takes, measured on a few graphs. The largest makes the memory that all of them work in; each
    has launches besides, in memory of the driver, where the least seen counts: other processes may allocate meanwhile."""
    sizes, device = ladder(max_num_seqs), pool.device
    start_bytes, driver_bytes = torch.cuda.memory_reserved(device), []
    capture = CudaCapture()

    def measured(work: Callable[[], None]) -> Callable[[], None]:
        before = _driver_bytes(device)
        replay = capture(work)
        driver_bytes.append(_driver_bytes(device) - before)
        return replay

    graphs = DecodeGraphs(model, pool, max_model_len, sorted({*sizes[:2], sizes[-1]}), measured)
    torch_bytes = torch.cuda.memory_reserved(device) - start_bytes
    del graphs
    return torch_bytes + len(sizes) * max(0, min(driver_bytes))


class CudaCapture:
    """Captures into one pool of memory. What it returns must be run in a single stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        # Once without recording: what happens only once, as compiling kernels and making workspaces, must not be recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay


def _padded(rows: NDArray[np.generic], num_rows: int) -> NDArray[np.generic]:
    padded = np.zeros((num_rows, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def _driver_bytes(device: torch.device) -> int:
    """Memory of the device that is neither free nor torch's."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
