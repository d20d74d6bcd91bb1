"""Time on a GPU, as the GPU sees it: the work is captured once as a CUDA graph, so that no launch waits for Python, and before
each measured replay the L2 cache is overwritten, as other layers' data would have done."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

FLUSH_BYTES = 256 * 2**20  # more than any device's L2
COPY_BYTES = 2**30


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a graph. Runs it a few times first: kernels compile and libraries allocate outside of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def seconds(work: Callable[[], object], num_runs: int = 20) -> float:
    """The median time of one run."""
    return replay_seconds(capture(work).replay, num_runs)


def replay_seconds(replay: Callable[[], object], num_runs: int = 20) -> float:
    """The same for work that launches without waiting for Python, such as a graph's replay."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    spans = []
    for _ in range(num_runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        replay()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    elapsed_ms: list[float] = [start.elapsed_time(end) for start, end in spans]
    return median(elapsed_ms) / 1e3


def copy_bytes_per_s() -> float:
    """What the device's memory gives to a plain copy, bytes read and written counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))
