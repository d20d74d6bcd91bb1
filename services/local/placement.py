"""Which cores and GPUs each worker of one machine gets: the workers must not wait for each other's threads or memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's place."""

    cpus: tuple[int, ...]  # cores to stay on; empty: all
    gpu: str = ""  # name for CUDA_VISIBLE_DEVICES; empty: none
    num_on_gpu: int = 1  # workers that share that GPU's memory


def place(num_workers: int, cpus: tuple[int, ...], gpus: tuple[str, ...]) -> list[Placement]:
    """With GPUs, workers take turns on them and share all cores. Without, each has cores of its own, as evenly as they go, the
    first workers one more; with fewer cores than workers, several share a core."""
    if gpus:
        names = [gpus[i % len(gpus)] for i in range(num_workers)]
        return [Placement((), name, names.count(name)) for name in names]
    if len(cpus) < num_workers:
        return [Placement((cpus[i % len(cpus)],) if cpus else ()) for i in range(num_workers)]
    share, num_larger = divmod(len(cpus), num_workers)
    starts = [i * share + min(i, num_larger) for i in range(num_workers + 1)]
    return [Placement(cpus[start:end]) for start, end in pairwise(starts)]


def usable_cpus() -> tuple[int, ...]:
    """Cores this process may use; empty where processes cannot be kept on cores."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else ()


def usable_gpus(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """NVIDIA GPUs that workers with --device `device` may use, found without loading CUDA."""
    if device == "cpu":
        return ()
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name not in ("", "-1"))
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
