"""The KV pool: the memory that all blocks of a worker live in.

    blocks[NB, L, 2, Hkv, head_bytes] uint8      block b is one run of `geometry.block_bytes` bytes
           │   │  │   │    └ of the block's tokens: values [BS, D], with one-byte types also scales [BS]
           │   │  │   └ KV heads                           (`shared/kernels/kv_layout.py`)
           │   │  └ K, V
           │   └ layers
           └ blocks; block 0 is the null block

Copies, transfers and checksums are of bytes, whatever the type; `layers` are the typed views of the same memory that kernels
compute with. The pool does not know who owns blocks: the block manager does. A network thread reads and writes blocks here while
the engine thread computes on others. On a GPU both use the default stream, so a read sees all that was launched before it, and a
forward pass launched after a write sees the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.base.errors import CorruptTransfer
from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import BlockPart, as_slice
from shared.engine.memory.pool_memory import SharedStorage, Storage, zeroed_storage
from shared.kernels.interface import Kernels
from shared.kernels.kv_layout import KvLayer, typed_views
from shared.models.dtype import KV_DTYPES


class KvPool:
    """`storage` makes the memory: (bytes, device) -> uint8 tensor of that length, all zero."""

    def __init__(
        self, geometry: KvGeometry, num_blocks: int, device: torch.device, kernels: Kernels, storage: Storage = zeroed_storage
    ) -> None:
        g = geometry
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._kernels = kernels
        memory = storage(num_blocks * g.block_bytes, device)
        self.shared_storage = storage if isinstance(storage, SharedStorage) else None
        self.blocks = memory.view(num_blocks, *g.block_shape)
        self.kv, self.scales = typed_views(self.blocks, KV_DTYPES[g.kv_dtype], g.block_size, g.head_dim)
        self.layers = tuple(self._layer(index) for index in range(g.num_layers))

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def _layer(self, index: int) -> KvLayer:
        return KvLayer(self.kv[:, index], None if self.scales is None else self.scales[:, index])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, target) each. No target is also a source."""
        if copies:
            pairs = torch.tensor(copies, dtype=torch.int64).to(self.device)
            self._kernels.copy_blocks(self.blocks, pairs[:, 0], pairs[:, 1])

    @property
    def cpu_blocks(self) -> NDArray[np.uint8]:
        """The bytes of a pool on a CPU, writable: [NB, L, 2, Hkv, head_bytes]."""
        return self.blocks.numpy()

    def gather(self, block_ids: Sequence[int], layers: range) -> Tensor:
        """Those layers of some blocks, one block after the other: flat uint8, on the pool's device."""
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self.device)
        if layers == range(self.geometry.num_layers):
            return self._kernels.gather_blocks(self.blocks, ids).flatten()
        return self.blocks[ids, as_slice(layers)].flatten()

    def read_blocks(self, block_ids: Sequence[int], layers: range) -> bytes | memoryview:
        """Those layers of some blocks, one block after the other. Waits for the device."""
        if self.device.type == "cpu":
            blocks, run = self.cpu_blocks, as_slice(layers)
            return b"".join([blocks[b, run].data for b in block_ids])  # layers of one block are one run of bytes
        return self.gather(block_ids, layers).cpu().numpy().data

    def write_blocks(self, block_ids: Sequence[int], data: bytes | bytearray | memoryview | Tensor, part: BlockPart) -> None:
        """Writes a part of some blocks: data is [len(block_ids), layers, 2, heads, head_bytes], as bytes or as a flat uint8 tensor
        on the pool's device. Raises CorruptTransfer, and writes nothing, if a range or the size of `data` is wrong."""
        g = self.geometry
        self._check_range("block", range(min(block_ids, default=0), max(block_ids, default=0) + 1), range(1, self.num_blocks))
        self._check_range("layer", part.layers, range(g.num_layers))
        self._check_range("head", part.heads, range(g.num_kv_heads))
        shape = (len(block_ids), len(part.layers), 2, len(part.heads), g.head_bytes)
        size_bytes = data.numel() if isinstance(data, Tensor) else len(data)
        if size_bytes != prod(shape):
            raise CorruptTransfer(
                f"{size_bytes} bytes came for {len(block_ids)} blocks of {len(part.layers)} layers; {prod(shape)} are due"
            )
        layers, heads = as_slice(part.layers), as_slice(part.heads)
        if self.device.type == "cpu":
            target = self.cpu_blocks
            source = data.numpy() if isinstance(data, Tensor) else np.frombuffer(data, dtype=np.uint8)
            for block_id, block in zip(block_ids, source.reshape(shape), strict=True):
                target[block_id, layers, :, heads] = block
            return
        on_device = data if isinstance(data, Tensor) else self._upload(data)
        blocks = on_device.view(shape)
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self.device)
        if blocks.shape[1:] == self.blocks.shape[1:]:
            self._kernels.scatter_blocks(self.blocks, ids, blocks)
        else:
            self.blocks[ids, layers, :, heads] = blocks

    def _upload(self, data: bytes | bytearray | memoryview) -> Tensor:
        """Pinned memory is what an asynchronous copy needs; its allocator keeps it until the copy is done."""
        staging = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
        staging.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
        return staging.to(self.device, non_blocking=True)

    @staticmethod
    def _check_range(what: str, run: range, allowed: range) -> None:
        if not allowed.start <= run.start < run.stop <= allowed.stop:
            raise CorruptTransfer(f"{what}s {run.start}..{run.stop - 1} are not within {allowed.start}..{allowed.stop - 1}")
