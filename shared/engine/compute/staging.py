"""Copies between main memory and device that do not wait for each other.

A copy is asynchronous only from or to pinned memory; torch's allocator of such memory does not hand a piece out again before the
copies that use it are done. On a CPU an array and a tensor share memory, and nothing is copied that need not be.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    return _staged(array, device).to(device, non_blocking=True)


def copy_in(target: Tensor, array: NDArray[Any]) -> None:
    """target[...] = array, of the same shape and type."""
    target.copy_(_staged(array, target.device), non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor's values in main memory. From a GPU they have arrived when a `Fence` that was made after this call is passed."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class Fence:
    """Behind all that has been launched on the device until now."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def is_passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _staged(array: NDArray[Any], device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host
