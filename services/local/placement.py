"""Which cores and GPUs each worker of one machine gets: the workers must not wait for each other's threads or memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's place."""

    cpus: tuple[int, ...]  # cores to stay on; empty: all
    num_threads: int | None = None  # to compute with on a CPU; None: as many as there are cores
    gpu: str = ""  # name for CUDA_VISIBLE_DEVICES; empty: none
    num_on_gpu: int = 1  # workers that share that GPU's memory


def place(num_workers: int, cpus: tuple[int, ...], num_usable: int, gpus: tuple[str, ...]) -> list[Placement]:
    """With GPUs, workers take turns on them and share all cores. Without, each has cores of its own, as evenly as they go, the
    first workers one more; with fewer cores than workers, several share a core. Of `cpus`, a container's quota lets `num_usable` be
    busy at a time: that many threads are shared out."""
    if gpus:
        names = [gpus[i % len(gpus)] for i in range(num_workers)]
        return [Placement((), None, name, names.count(name)) for name in names]
    if not cpus:
        return [Placement(())] * num_workers
    if len(cpus) < num_workers:
        return [Placement((cpus[i % len(cpus)],), 1) for i in range(num_workers)]
    starts = list(accumulate(_shares(len(cpus), num_workers), initial=0))
    num_threads = _shares(min(num_usable, len(cpus)), num_workers)
    return [Placement(cpus[start:end], max(1, num)) for (start, end), num in zip(pairwise(starts), num_threads, strict=True)]


def _shares(total: int, count: int) -> list[int]:
    """`total` in whole numbers, as evenly as it goes, the first ones one more."""
    share, num_larger = divmod(total, count)
    return [share + (i < num_larger) for i in range(count)]


def usable_gpus(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """NVIDIA GPUs that workers with --device `device` may use, found without loading CUDA."""
    if device == "cpu":
        return ()
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name not in ("", "-1"))
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
