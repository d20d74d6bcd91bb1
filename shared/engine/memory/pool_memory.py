"""Where a pool's bytes live: memory of this process alone, or anonymous shared memory that other processes of this machine can map.

The shared kind is a memfd. It has no name, so nothing is left behind however the process ends. Its size is sealed: a process that
was handed it cannot cut it off under the owner's feet.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from shared.base.errors import ConfigError

Storage = Callable[[int, torch.device], Tensor]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def zeroed_storage(size_bytes: int, device: torch.device) -> Tensor:
    """[size_bytes] uint8, zero. On a CPU a page takes memory when it is first written: a worker starts at once, and an idle one is
    small. Large pages where the kernel gives them, since decode attention reads blocks in random order."""
    if device.type != "cpu":
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class SharedStorage:
    """Storage in a memfd, for one pool on a CPU. `fd` is open as long as this object lives."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("twostroke-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def __call__(self, size_bytes: int, device: torch.device) -> Tensor:
        """[size_bytes] uint8, zero. Raises ConfigError if the machine will not give so much shared memory: later, the first write
        to a page that is not there would kill the process."""
        assert device.type == "cpu", f"shared storage is main memory, not {device}"
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)
        except OSError as error:
            raise ConfigError(f"no {size_bytes} bytes of shared memory for the KV pool: {error.strerror}") from None
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        # One call that maps all pages is several times faster than a fault for each at its first use.
        memory = mmap.mmap(self.fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.fd)
