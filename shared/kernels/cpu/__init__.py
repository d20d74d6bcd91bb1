"""Kernels for CPUs: C++ with portable SIMD, compiled on first use."""

from shared.kernels.cpu.build import CannotBuild
from shared.kernels.cpu.kernels import CpuKernels

__all__ = ["CannotBuild", "CpuKernels"]
