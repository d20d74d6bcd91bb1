"""What the linear layers of a step cost on the CPU: `python -m bench.kernels.cpu_linear [--rows 1,8,32,128,512] [--num-threads N]`.

All layers' matrices of SmolLM2-135M in turn, so that no cache holds them, by our product and by torch's. Their rates stand beside
two limits measured in the same run, interleaved: reading memory (few rows) and torch's product of large square matrices (many).
Each figure is the best of several rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.cpu import CpuKernels

# Rows and columns of qkv, o, gate and up, down.
MATRICES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
NUM_LAYERS = 30
_SQUARE = 1024

Run = Callable[[], object]
Product = Callable[[Tensor], Tensor]


def _ours(kernels: CpuKernels, kind: str) -> list[Product]:
    """`kind`: float32, bfloat16, or mixed: float32 rows and bfloat16 weights."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    return [partial(_product, kernels, kernels.pack_linear(weight.to(dtype))) for weight in _weights(narrow=kind == "mixed")]


def _product(kernels: CpuKernels, packed: Any, x: Tensor) -> Tensor:
    return kernels.linear(x, packed)


def _torchs(dtype: torch.dtype) -> list[Product]:
    return [partial(F.linear, weight=weight.to(dtype)) for weight in _weights(narrow=False)]


def _weights(narrow: bool) -> Iterator[Tensor]:
    for shape in MATRICES * NUM_LAYERS:
        weight = torch.randn(shape)
        yield weight.bfloat16().float() if narrow else weight


def _step(products: list[Product], num_rows: int, dtype: torch.dtype) -> Run:
    inputs = [torch.randn(num_rows, columns).to(dtype) for _, columns in MATRICES] * NUM_LAYERS

    def run() -> None:
        for product, x in zip(products, inputs, strict=True):
            product(x)

    return run


def _best_s(runs: dict[str, Run], num_rounds: int) -> dict[str, float]:
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(num_rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128, 512])
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    kernels = CpuKernels()
    kinds = {kind: _ours(kernels, kind) for kind in ("float32", "mixed", "bfloat16")}
    kinds |= {f"torch {kind}": _torchs(getattr(torch, kind)) for kind in ("float32", "bfloat16")}
    buffer, square = torch.ones(2**26), torch.randn(_SQUARE, _SQUARE)
    num_weights = NUM_LAYERS * sum(rows * columns for rows, columns in MATRICES)
    print(f"{'rows':>5}  {'product':14}{'ms':>8}{'GB/s':>8}{'of memory':>11}{'GFLOP/s':>9}{'of square':>11}")
    for num_rows in args.rows:
        runs: dict[str, Run] = {"memory": buffer.sum, "square": lambda: square @ square}
        for kind, products in kinds.items():
            runs[kind] = _step(products, num_rows, torch.bfloat16 if kind.endswith("bfloat16") else torch.float32)
        best_s = _best_s(runs, args.num_rounds)
        memory, flops = buffer.nbytes / best_s["memory"], 2 * _SQUARE**3 / best_s["square"]
        for kind in kinds:
            itemsize = 2 if kind == "mixed" or kind.endswith("bfloat16") else 4
            rate, work = num_weights * itemsize / best_s[kind], 2 * num_weights * num_rows / best_s[kind]
            print(
                f"{num_rows:5}  {kind:14}{best_s[kind] * 1e3:8.1f}{rate / 1e9:8.1f}{rate / memory:11.0%}"
                f"{work / 1e9:9.1f}{work / flops:11.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
