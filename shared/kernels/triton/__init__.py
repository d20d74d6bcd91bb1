"""Kernels for GPUs in Triton. `body.py` is the interface's implementation, `aot.py` lists every launch that it can choose."""

from __future__ import annotations

from shared.kernels.triton.body import TritonKernels

__all__ = ["TritonKernels"]
