"""SiLU of the gate times the up projection, in one pass over the fused projection's output."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.triton.launch import Launch, require

TILE_FEATURES = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, stride_row, num_features, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    present = feature < num_features
    gate = tl.load(gate_up + row * stride_row + feature, mask=present, other=0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + num_features + feature, mask=present, other=0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * num_features + feature, result.to(out.dtype.element_ty), mask=present)


def silu_mul_launch(gate_up: Tensor, out: Tensor) -> Launch:
    """gate_up [T, 2E] -> out [T, E], contiguous."""
    num_rows, num_features = out.shape
    require(gate_up.shape == (num_rows, 2 * num_features), f"gate_up {gate_up.shape} does not fit out {out.shape}")
    require(gate_up.stride(1) == 1 and out.is_contiguous(), "features must be contiguous")
    arguments = {
        "gate_up": gate_up,
        "out": out,
        "stride_row": gate_up.stride(0),
        "num_features": num_features,
        "TILE": TILE_FEATURES,
    }
    return Launch(silu_mul_kernel, (num_rows, triton.cdiv(num_features, TILE_FEATURES)), arguments, num_warps=4)
