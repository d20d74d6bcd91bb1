"""RMSNorm, alone or fused with the residual addition before it: one pass over the rows.

A program normalizes `ROWS` rows, held whole in registers: one long row of hidden features, or several short ones of a head
each. Rows may be strided views, [outer, inner, E], as the heads of a fused projection are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.triton.launch import Launch, pad, require

TARGET_TILE = 1024  # elements; short rows share a program until they fill it
MAX_FEATURES = 32768


@triton.jit
def rms_norm_kernel(
    x,
    residual,  # None, or [rows, E] contiguous: takes x + residual, which is what gets normalized
    weight,
    out,  # [rows, E] contiguous
    stride_outer,
    stride_inner,
    num_rows,
    num_inner,
    num_features,
    eps,
    ROWS: tl.constexpr,
    FEATURES_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    feature = tl.arange(0, FEATURES_PAD)[None, :]
    present = (row < num_rows) & (feature < num_features)
    source = x + row // num_inner * stride_outer + row % num_inner * stride_inner + feature
    values = tl.load(source, mask=present, other=0).to(tl.float32)
    if residual is not None:
        target = residual + row * num_features + feature
        values += tl.load(target, mask=present, other=0).to(tl.float32)
        # What later layers read is the rounded sum, so that is what is normalized.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(target, rounded, mask=present)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / num_features + eps)
    gain = tl.load(weight + feature, mask=feature < num_features, other=0).to(tl.float32)
    normed = values * scale[:, None] * gain
    tl.store(out + row * num_features + feature, normed.to(out.dtype.element_ty), mask=present)


def rms_norm_launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Launch:
    """x [E], [T, E] or [T, H, E], the last axis contiguous; weight [E]; residual (or None) and out of x's shape, contiguous."""
    num_features = x.shape[-1]
    require(x.dim() <= 3 and x.stride(-1) == 1, f"x {x.shape} with strides {x.stride()} is not rows of contiguous features")
    require(weight.shape == (num_features,) and weight.is_contiguous(), f"weight {weight.shape} does not fit x {x.shape}")
    require(num_features <= MAX_FEATURES, f"at most {MAX_FEATURES} features, got {num_features}")
    require(residual is None or (residual.shape == x.shape and residual.is_contiguous()), f"residual does not fit x {x.shape}")
    num_rows = x.numel() // num_features
    padded = pad(num_features)
    arguments = {
        "x": x,
        "residual": residual,
        "weight": weight,
        "out": out,
        "stride_outer": x.stride(0) if x.dim() > 1 else 0,
        "stride_inner": x.stride(1) if x.dim() == 3 else 0,
        "num_rows": num_rows,
        "num_inner": x.shape[1] if x.dim() == 3 else 1,
        "num_features": num_features,
        "eps": eps,
        "ROWS": max(1, TARGET_TILE // padded),
        "FEATURES_PAD": padded,
    }
    grid = (triton.cdiv(num_rows, max(1, TARGET_TILE // padded)),)
    return Launch(rms_norm_kernel, grid, arguments, num_warps=norm_num_warps(padded))


def norm_num_warps(features_pad: int) -> int:
    """At most 16 elements per thread up to the largest program."""
    return min(32, max(4, features_pad // 512))
