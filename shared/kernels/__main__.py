"""Builds the CPU kernels ahead of time, for `make setup` and container images: `python -m shared.kernels`."""

from __future__ import annotations

import sys

import torch

from shared.kernels.cpu.build import CannotBuild, is_built, load_native


def main() -> None:
    if torch.cuda.is_available():
        return  # the GPU's own kernels are compiled by Triton when they are first used
    try:
        if not is_built():
            print("building the CPU kernels, once; about a minute", file=sys.stderr)
            load_native()
    except CannotBuild as error:
        print(f"serving without them, several times slower: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
