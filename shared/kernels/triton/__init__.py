"""Kernels for GPUs in Triton.

In come the calls of `shared/kernels/interface.py`, through `backend.py`, the class that implements it. Each idea has a file that
holds the kernel and the function that checks shapes and makes its launch:

    activation.py, norm.py, rope_store.py     elementwise work, fused with what stands next to it
    attention.py                              chooses: attention_decode.py for single queries, attention_prefill.py for prompts,
                                              both on the arithmetic of attention_tile.py
    blocks.py                                 whole KV blocks: copy, gather, scatter
    sampling.py                               logits to tokens, without sorting
    launch.py                                 one launch as a value: kernel, grid, arguments

Out go launches on the current CUDA stream. `aot.py` lists every launch that a model can need, and compiles it without a GPU.
"""

from __future__ import annotations

from shared.kernels.triton.backend import TritonKernels

__all__ = ["TritonKernels"]
