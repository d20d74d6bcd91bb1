"""The sending end of the handoff: one object per transfer attempt, used in the order open, push…, commit; or abort at any point.

A chunk is as many whole blocks as fit the receiver's limit. Chunks go out while the next part of the prompt is computed; HTTP/2
flow control paces them. The commit is a message of the same stream, so it cannot overtake a chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import xxhash

from shared.engine.kv_pool import KvPool
from shared.errors import DeadlineExceeded
from shared.grpc_errors import from_rpc_error
from shared.request import Token
from shared.rpc import control_pb2, kv_pb2, kv_pb2_grpc
from shared.transfer import metrics
from shared.wire import token_to_wire
from shared.worker_info import KvGeometry

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 2.0


class Sender:
    """Raises the error the receiver raised, or what became of the call (Unavailable, DeadlineExceeded)."""

    def __init__(
        self, channel: Any, destination: control_pb2.Destination, geometry: KvGeometry, pool: KvPool, timeout_s: float
    ) -> None:
        self._stub = kv_pb2_grpc.KvTransferStub(channel)
        self._key = kv_pb2.TransferKey(
            transfer_id=destination.transfer_id, attempt=destination.attempt, boot_id=destination.boot_id
        )
        self._geometry = geometry
        self._pool = pool
        self._timeout_s = timeout_s
        self._max_chunk_blocks = 1
        self._num_chunks = 0
        self._num_blocks = 0
        self._call: Any = None

    @property
    def num_shipped_blocks(self) -> int:
        return self._num_blocks

    async def open(self, num_blocks: int) -> int:
        """Reserves the prompt's blocks at the receiver. Returns how many leading ones it already holds."""
        g = self._geometry
        geometry = kv_pb2.KvGeometry(
            digest=g.digest,
            num_layers=g.num_layers,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            block_size=g.block_size,
            kv_dtype=g.kv_dtype,
        )
        request = kv_pb2.OpenRequest(key=self._key, geometry=geometry, num_blocks=num_blocks)
        try:
            reply = await self._stub.Open(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        self._max_chunk_blocks = max(1, reply.max_chunk_bytes // g.block_bytes)
        self._call = self._stub.Push()
        return int(reply.num_cached_blocks)

    async def push(self, first_block: int, block_ids: Sequence[int]) -> None:
        """Ships blocks of this worker's pool as the prompt's blocks first_block, first_block + 1, …"""
        for start in range(0, len(block_ids), self._max_chunk_blocks):
            part = block_ids[start : start + self._max_chunk_blocks]
            data = self._pool.read_blocks(part)
            chunk = kv_pb2.Chunk(
                sequence_number=self._num_chunks,
                first_block=first_block + start,
                num_blocks=len(part),
                num_layers=self._geometry.num_layers,
                num_heads=self._geometry.num_kv_heads,
                checksum=xxhash.xxh3_64_intdigest(data),
                data=bytes(data),
            )
            await self._write(kv_pb2.PushRequest(key=self._key, chunk=chunk))
            self._num_chunks += 1
            self._num_blocks += len(part)
            metrics.transferred_bytes.labels("sent", "grpc").inc(len(chunk.data))

    async def commit(self, first_tokens: Sequence[Token], num_cached_tokens: int) -> None:
        """Sends the manifest and waits for the acknowledgement: after it the blocks may be released."""
        commit = kv_pb2.Commit(
            num_chunks=self._num_chunks,
            num_blocks=self._num_blocks,
            first_tokens=[token_to_wire(t) for t in first_tokens],
            num_cached_tokens=num_cached_tokens,
        )
        await self._write(kv_pb2.PushRequest(key=self._key, commit=commit))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call.done_writing()
                await self._call
        except TimeoutError:
            raise DeadlineExceeded(f"no acknowledgement within {self._timeout_s:.1f} s") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def abort(self, reason: str) -> None:
        """Gives the receiver's reservation back, as far as it can be reached; its lease does the rest. Never raises."""
        if self._call is not None:
            self._call.cancel()
        try:
            await self._stub.Abort(kv_pb2.AbortRequest(key=self._key, reason=reason), timeout=_ABORT_TIMEOUT_S)
        except grpc.RpcError as error:
            log.info("abort of a transfer did not arrive: %s", error.code().name)

    async def _write(self, message: kv_pb2.PushRequest) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"a chunk was not taken within {self._timeout_s:.1f} s") from None
        except asyncio.InvalidStateError:  # the receiver has already ended the call: its status says why
            await self._raise_status()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def _raise_status(self) -> None:
        try:
            await self._call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
