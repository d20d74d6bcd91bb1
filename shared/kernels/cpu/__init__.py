"""Kernels for CPUs: C++ with portable SIMD, compiled on first use.

In come the calls of `shared/kernels/interface.py`, through `kernels.py`, the class that implements it. `native.py` types the
compiled functions, `build.py` compiles them for this CPU and keeps the result in the cache folder. In C++:

    bindings.cpp, ops.h                       what Python sees, and the checks and type dispatch of all operations
    linear.cpp, panels.h, tiles.h             products on packed panels; linear_few_bf16.cpp, dot_bf16.h: few rows of bfloat16
    attention.cpp, attention.h                chooses: attention_singles.cpp for single queries, attention_chunks.cpp for prompts
    rope.cpp, quantized.h, blocks.cpp         rotation and storing, one-byte pools, whole KV blocks
    elementwise.cpp, sampling.cpp             norms, activation, embedding; logits to tokens
    lanes.h, loads.h, groups.h, scalar.h      vectors and their loads, groups of rows, exp; work.h: items shared by threads

Out go tensors. A row of a linear layer and of attention has the same bits whatever else is in the step.
"""

from shared.kernels.cpu.build import CannotBuild
from shared.kernels.cpu.kernels import CpuKernels

__all__ = ["CannotBuild", "CpuKernels"]
