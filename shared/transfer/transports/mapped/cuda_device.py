"""GPU memory of another process, through the CUDA driver's IPC calls: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html

torch shares tensors too, but by pickling them and counting references in files; here one allocation is mapped once for each peer,
and unmapped when the peer is gone. Nothing of this is called, and the driver not even loaded, before a worker has a pool on a GPU.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.engine.memory.block_part import as_slice
from shared.rpc import kv_pb2
from shared.transfer.transports.mapped.memory import Copy

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_WORD = torch.int64  # a head's run of bytes is a multiple of its size


class _Handle(ctypes.Structure):  # CUipcMemHandle, passed by value
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaDevice:
    """The `DeviceMemory` of real GPUs."""

    def __init__(self) -> None:
        """Raises OSError without an NVIDIA driver."""
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # for copies, beside the one that the model runs on
        self._addresses: dict[int, int] = {}  # what was opened, by the address of what was in it

    def export(self, blocks: Tensor) -> kv_pb2.CudaMemory:
        address = ctypes.c_uint64(blocks.data_ptr())
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with torch.cuda.device(blocks.device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        uuid = str(torch.cuda.get_device_properties(blocks.device).uuid)
        return kv_pb2.CudaMemory(ipc_handle=bytes(handle), offset_bytes=address.value - base.value, device_uuid=uuid)

    def open(self, memory: kv_pb2.CudaMemory, size_bytes: int) -> Tensor:
        if len(memory.ipc_handle) != _HANDLE_BYTES:
            raise OSError(f"an IPC handle has {_HANDLE_BYTES} bytes, not {len(memory.ipc_handle)}")
        device = _find_device(memory.device_uuid)
        base = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(memory.ipc_handle)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current on this thread
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
        address = base.value + memory.offset_bytes
        self._addresses[address] = base.value
        return torch.as_tensor(_Bytes(address, size_bytes), device=device)

    def close(self, mapped: Tensor) -> None:
        with torch.cuda.device(mapped.device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(self._addresses.pop(mapped.data_ptr())))

    def begin(self, source: Tensor, target: Tensor, copy: Copy) -> None:
        stream = self._stream(target.device)
        with torch.cuda.device(target.device), torch.cuda.stream(stream):
            targets = _ids(copy.targets, target.device)
            sources = _ids(copy.sources, source.device)
            stream.wait_stream(torch.cuda.default_stream(source.device))
            layers, ours, theirs = as_slice(copy.layers), as_slice(copy.source_heads), as_slice(copy.target_heads)
            blocks = source.view(_WORD)[sources, layers, :, ours]
            target.view(_WORD)[targets, layers, :, theirs] = blocks.to(target.device)

    async def finish(self, target: Tensor) -> None:
        done = torch.cuda.Event()
        done.record(self._stream(target.device))
        await asyncio.to_thread(done.synchronize)

    async def settle(self, device: torch.device) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.default_stream(device))
        await asyncio.to_thread(done.synchronize)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")


class _Bytes:
    """Memory that belongs to nobody here, as torch takes it: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _ids(block_ids: Sequence[int], device: torch.device) -> Tensor:
    """From pinned memory: any other copy to a device waits for it."""
    return torch.tensor(block_ids, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _find_device(uuid: str) -> torch.device:
    """Raises OSError if this process does not see the GPU."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise OSError(f"its GPU {uuid} is not visible to this process")
