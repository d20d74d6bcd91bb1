"""The C library's allocator, told to keep large buffers that were freed instead of giving them back to the kernel.

A chunk of KV passes through buffers of megabytes on its way through gRPC. By default each of them is mapped anew and unmapped
again, and the kernel's clearing of its pages costs the receiver more than all the copying (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's mallopt(3)
_LARGEST_KEPT_BYTES = 32 * 1024 * 1024  # the most that glibc allows
_KEPT_BYTES = 128 * 1024 * 1024  # of free memory at the end of an arena; more goes back to the kernel


def keep_large_buffers() -> None:
    """For this process, from now on. Does nothing where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
