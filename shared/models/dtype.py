"""Which type to compute in, and which to store keys and values in. The names are those of `--dtype` and of `KvGeometry`."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from shared.base.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
_KV_OPTIONS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
_FP8_CAPABILITY = (8, 9)  # of NVIDIA GPUs that convert float8_e4m3fn

# x86 (AVX512_BF16 or AMX) and ARM have dot products of bfloat16 pairs; without them torch converts each product, about ten
# times slower than float32.
_NATIVE_BFLOAT16 = re.compile(r"^(?:flags|Features)\s*:.*\b(?:avx512_bf16|amx_bf16|bf16)\b", re.MULTILINE)


def choose_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that `--dtype` names. "auto" is the checkpoint's on a GPU; on a CPU bfloat16 if it is the checkpoint's and the
    CPU multiplies it natively, else float32. Raises ConfigError for what the device cannot do."""
    if name == "float16" and device.type == "cpu":
        raise ConfigError("--dtype float16 needs a GPU; on a CPU use bfloat16, float32 or auto")
    if name != "auto":
        return DTYPES[name]
    if checkpoint not in DTYPES.values():
        return torch.float32
    if device.type == "cpu" and not (checkpoint is torch.bfloat16 and has_native_bfloat16()):
        return torch.float32
    return checkpoint


def choose_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that `--kv-cache-dtype` names; "auto" is `dtype`, the one computed in. Raises ConfigError for what the device cannot
    do."""
    if name == "auto":
        return dtype
    kv_dtype = _KV_OPTIONS[name]
    if kv_dtype is torch.float8_e4m3fn and _is_nvidia(device) and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or later, and {torch.cuda.get_device_name(device)} is "
            "older; use int8 or auto"
        )
    return kv_dtype


def name_of(dtype: torch.dtype) -> str:
    """As in `KV_DTYPES`."""
    return next(name for name, value in KV_DTYPES.items() if value is dtype)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def has_native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """False where it cannot be told (no Linux): float32 is never wrong."""
    return cpuinfo.is_file() and bool(_NATIVE_BFLOAT16.search(cpuinfo.read_text()))
