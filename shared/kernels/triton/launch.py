"""A launch as a value: wrappers check their tensors and describe the launch; running it and compiling it ahead are two uses.

`shared/kernels/triton/aot.py` compiles what these descriptions say, so the tests see exactly the kernels and configurations
that dispatch chooses on a device, without a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.base.errors import Internal
from shared.kernels.kv_layout import KvLayer

MIN_DOT_SIZE = 16  # rows and columns of the smallest tile that tensor cores take

_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        # A grid of no programs is a step without such work, and CUDA refuses it.
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise Internal(message)


def pad(size: int) -> int:
    """The power of two that a Triton tile needs to hold `size` elements."""
    return int(triton.next_power_of_2(size))


def pad_head(head_size: int) -> int:
    """As `pad`, and not below what a matrix multiply sums over at least."""
    return max(MIN_DOT_SIZE, pad(head_size))


def dot_dtype(x: Tensor) -> Any:
    """The type of matrix-multiply operands: that of x, which tensor cores take. Tensors on the CPU mean Triton's interpreter,
    which holds bfloat16 as bare 16-bit integers and multiplies these; there the operands must be float32."""
    return tl.float32 if x.device.type == "cpu" else _TRITON_DTYPES[x.dtype]


def mix_dtype(q: Tensor, kv_layer: KvLayer) -> Any:
    """The type of products of weights and values. Weights that a one-byte pool's scales have shrunk would leave float16's range;
    bfloat16 holds them, and all one-byte values exactly."""
    dot = dot_dtype(q)
    return tl.bfloat16 if kv_layer.scales is not None and dot == tl.float16 else dot


def pool_arguments(kv_layer: KvLayer) -> dict[str, Any]:
    """What kernels are told of the pool: pointers to K and V of [NB, Hkv, BS, D], to their scales or None, and strides."""
    values, scales = kv_layer.values, kv_layer.scales
    return {
        "k_cache": values[:, 0],
        "v_cache": values[:, 1],
        "k_scales": None if scales is None else scales[:, 0],
        "v_scales": None if scales is None else scales[:, 1],
        "stride_block": values.stride(0),
        "stride_kv_head": values.stride(2),
        "stride_scale_block": 0 if scales is None else scales.stride(0),
        "stride_scale_head": 0 if scales is None else scales.stride(2),
    }


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What the choice of a launch may depend on besides shapes."""

    num_multiprocessors: int
    capability: int  # NVIDIA's compute capability, such as 90; 0 for other makers

    @property
    def multiplies_from_shared_memory(self) -> bool:
        """Hopper and the Blackwell of data centers: tensor cores read operands from shared memory, of which there is more than
        200 KiB. Elsewhere operands pass through registers, and wide tiles spill."""
        return 90 <= self.capability < 120

    @property
    def float32_precision(self) -> str:
        """Of large float32 products: three passes of tf32 on NVIDIA's tensor cores, plain cores elsewhere."""
        return "tf32x3" if self.capability else "ieee"


# What a launch is sized for where no device can be asked (the interpreter).
ASSUMED_TRAITS = DeviceTraits(num_multiprocessors=132, capability=90)


@lru_cache(maxsize=16)
def device_traits(device: torch.device) -> DeviceTraits:
    if device.type != "cuda":
        return ASSUMED_TRAITS
    properties = torch.cuda.get_device_properties(device)
    capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
    return DeviceTraits(properties.multi_processor_count, capability)
