"""What a model computes with: one interface, three backends, and the choice between them.

    interface.py    the operations, and the legend of axes
    kv_layout.py    how a block of the KV pool is laid out in bytes, and its typed views
    reference.py    plain torch, runs anywhere; the oracle of the other two
    cpu/            compiled C++ for CPUs
    triton/         for GPUs

In comes the name of a backend and a device, out goes an object of `interface.Kernels`. A backend is imported only when it is
chosen, so that none of them needs what another one does. `python -m shared.kernels` compiles the CPU's ahead of time.
"""

from __future__ import annotations

import logging

import torch

from shared.base.errors import ConfigError
from shared.kernels.interface import Kernels

log = logging.getLogger(__name__)


def load_kernels(name: str, device: torch.device) -> Kernels:
    """The backend called `name` ("auto": the fastest that works on `device`). Raises ConfigError if it cannot run there."""
    if name == "auto":
        return _triton() if device.type == "cuda" else _cpu_or_reference()
    if name == "reference":
        return _reference()
    wanted = {"cpu": "cpu", "triton": "cuda"}[name]
    if device.type != wanted:
        raise ConfigError(f"--kernels {name} runs on {wanted}, but the device is {device.type}; use --kernels auto")
    try:
        return _cpu() if name == "cpu" else _triton()
    except ImportError as error:
        raise ConfigError(f"--kernels {name} cannot be loaded: {error}") from None


def _cpu_or_reference() -> Kernels:
    try:
        return _cpu()
    except ImportError as error:
        log.warning("compiled CPU kernels cannot be loaded (%s): using plain torch, several times slower per token", error)
        return _reference()


def _reference() -> Kernels:
    from shared.kernels.reference import ReferenceKernels

    return ReferenceKernels()


def _cpu() -> Kernels:
    from shared.kernels.cpu import CpuKernels

    return CpuKernels()


def _triton() -> Kernels:
    from shared.kernels.triton import TritonKernels

    return TritonKernels()
