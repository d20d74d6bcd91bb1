"""The engine loop on a GPU: how long a decode step takes when scheduling, sampling and delivery are part of it, against the step
alone on the device; with the next step launched ahead, and without.

The model is that of `bench/kernels/gpu_decode_step.py`. Requests are sent at once; only steps in which all of them decode count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

from bench.kernels.gpu_decode_step import BLOCK_SIZE, DTYPE, MAX_MODEL_LEN, kv_pool, llama_3_8b, random_decoder, step_seconds
from bench.kernels.gpu_kernels import Rows, fits
from shared.base.request import Output, Request, SamplingParams
from shared.engine.compute.decode_graphs import CudaCapture, DecodeGraphs
from shared.engine.compute.runner import ModelRunner
from shared.engine.engine import Engine
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Event, Pending, Plan
from shared.engine.schedule.scheduler import Scheduler
from shared.models.decoder import Decoder

BATCH_SIZES = (1, 64, 256)
PROMPT_LEN, NUM_OUTPUT_TOKENS = 512, 128
MAX_NUM_BATCHED_TOKENS = 8192
TIMEOUT_S = 120.0


class _Synchronous:
    """A runner whose steps the engine does not launch ahead."""

    is_asynchronous = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Pending:
        return self._runner.launch(plan, on_layer)


def engine_steps() -> Rows:
    config = llama_3_8b()
    model, _ = random_decoder(config)
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE.itemsize
    rows: Rows = []
    for batch_size in BATCH_SIZES:
        if not fits(batch_size * (PROMPT_LEN + NUM_OUTPUT_TOKENS) * token_bytes):
            continue
        device_s = step_seconds(model, batch_size, PROMPT_LEN + NUM_OUTPUT_TOKENS // 2)
        runner = _runner(model, batch_size)
        ahead_s, waiting_s = _period_s(runner, runner, batch_size), _period_s(_Synchronous(runner), runner, batch_size)
        rows.append(
            {
                "batch": batch_size,
                "device ms": device_s * 1e3,
                "engine ms": ahead_s * 1e3,
                "not ahead ms": waiting_s * 1e3,
                "device's share": device_s / ahead_s,
            }
        )
        del runner
        torch.cuda.empty_cache()
    return rows


def _runner(model: Decoder, batch_size: int) -> ModelRunner:
    pool = kv_pool(model, 1 + batch_size * (1 + (PROMPT_LEN + NUM_OUTPUT_TOKENS) // BLOCK_SIZE))
    graphs = DecodeGraphs(model, pool, MAX_MODEL_LEN, [batch_size], CudaCapture())
    return ModelRunner(model, pool, MAX_MODEL_LEN, graphs)


def _period_s(runner: ModelRunner | _Synchronous, owner: ModelRunner, batch_size: int) -> float:
    """The median time between two steps in which every request gets a token."""
    pool = owner.pool
    max_model_len = PROMPT_LEN + NUM_OUTPUT_TOKENS + 1
    scheduler = Scheduler(
        BlockManager(pool.num_blocks, BLOCK_SIZE, enable_prefix_caching=False),
        digest="bench",
        max_num_seqs=batch_size,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=max_model_len,
    )
    delivered_s: list[float] = []
    num_ended, all_ended = 0, threading.Event()

    def listen(events: Sequence[Event]) -> None:
        nonlocal num_ended
        if len(events) == batch_size:
            delivered_s.append(time.perf_counter())
        num_ended += sum(isinstance(event, Output) and event.finish_reason is not None for event in events)
        if num_ended == batch_size:
            all_ended.set()

    engine = Engine(runner, scheduler, listen)
    engine.start()
    for row in range(batch_size):
        prompt = [(row + 7 * i) % owner.vocab_size for i in range(PROMPT_LEN)]
        engine.submit(Request(f"r{row}", prompt, PROMPT_LEN, SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)))
    if not all_ended.wait(TIMEOUT_S):
        raise TimeoutError(f"{num_ended} of {batch_size} requests ended in {TIMEOUT_S:.0f} s")
    engine.stop()
    return median(after - before for before, after in pairwise(delivered_s))
