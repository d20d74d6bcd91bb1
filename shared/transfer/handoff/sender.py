"""The sending end of the handoff: one object per transfer attempt, used in the order open, push…, commit; or abort at any point.

A chunk is as many whole blocks as fit the receiver's limit, or, where not even one does, a few layers of it. Chunks go out while
the next part of the prompt is computed. The link moves the bytes (`shared/transfer/transports/interface.py`); their headers and the
commit are messages of one stream, so that the commit cannot overtake a chunk.

A worker that is split over several devices has a pool on each, with some of the heads (`HeadShard`). A chunk is one shard's part of
a run of blocks; the receiver, whatever its own split, counts a block as complete when all of its heads have come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from shared.base.errors import CorruptTransfer, DeadlineExceeded, Internal, Unavailable
from shared.base.request import Token
from shared.base.worker_info import KvGeometry
from shared.engine.memory.block_part import BlockPart
from shared.rpc import control_pb2, kv_pb2, kv_pb2_grpc
from shared.transfer.handoff import metrics
from shared.transfer.handoff.links import Links
from shared.transfer.transports.chunks import chunk_bytes, cut, fill_in
from shared.transfer.transports.heads import HeadShard
from shared.transfer.transports.interface import Link, Peer, Writer
from shared.wire.conversions import token_to_wire
from shared.wire.errors import from_rpc_error

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 2.0


class Sender:
    """Raises the error the receiver raised, or what became of the call (Unavailable, DeadlineExceeded)."""

    def __init__(
        self,
        links: Links,
        channel: Any,
        destination: control_pb2.Destination,
        geometry: KvGeometry,
        shards: Sequence[HeadShard],
        timeout_s: float,
    ) -> None:
        """`geometry` is the whole model's, and `shards` together hold all of its heads."""
        assert sum(s.pool.geometry.num_kv_heads for s in shards) == geometry.num_kv_heads, "the shards are not the whole model"
        self._links = links
        self._peer = Peer(kv_pb2_grpc.KvTransferStub(channel), destination.boot_id)
        self._key = kv_pb2.TransferKey(
            transfer_id=destination.transfer_id, attempt=destination.attempt, boot_id=destination.boot_id
        )
        self._geometry = geometry
        self._shards = shards
        self._timeout_s = timeout_s
        self._max_chunk_bytes = 0
        self._num_chunks = 0
        self._num_blocks = 0
        self._link: Link | None = None
        self._writer: Writer | None = None
        self._call: Any = None
        self._call_ended = asyncio.Event()
        self._shipping: asyncio.Task[None] | None = None

    @property
    def num_shipped_blocks(self) -> int:
        return self._num_blocks

    @property
    def transport(self) -> str:
        """What the blocks go by; empty before `open`."""
        return self._writer.route.transport if self._writer is not None else ""

    async def open(self, num_blocks: int) -> int:
        """Reserves the prompt's blocks at the receiver. Returns how many leading ones it already holds."""
        self._link = await self._links.get(self._peer)
        self._writer = self._link.writer()
        reply = await self._open(self._link, self._writer, num_blocks)
        if reply.num_cached_blocks > num_blocks:
            raise CorruptTransfer(f"the receiver says that it has {reply.num_cached_blocks} of {num_blocks} blocks")
        self._writer.opened(reply)
        self._max_chunk_bytes = reply.max_chunk_bytes
        self._call = self._peer.stub.Push()
        self._call.add_done_callback(lambda _: self._call_ended.set())
        return int(reply.num_cached_blocks)

    async def push(self, first_block: int, block_ids: Sequence[int], layers: range | None = None) -> None:
        """Ships blocks of this worker's pools as the prompt's blocks first_block, first_block + 1, …; all layers of them, or some.
        A block's layers go in order, and with its last one it counts as shipped."""
        g = self._geometry
        wanted = range(g.num_layers) if layers is None else layers
        for blocks, run in cut(len(block_ids), wanted, g.block_bytes // g.num_layers, self._max_chunk_bytes):
            for shard in self._shards:
                await self._ship(shard, first_block + blocks.start, block_ids[blocks.start : blocks.stop], run)
        if wanted.stop == g.num_layers:
            self._num_blocks += len(block_ids)

    async def commit(self, first_tokens: Sequence[Token], num_cached_tokens: int) -> None:
        """Sends the manifest and waits for the acknowledgement: after it the blocks may be released."""
        assert self._writer is not None, "commit() before open()"
        self._writer.close()
        commit = kv_pb2.Commit(
            num_chunks=self._num_chunks,
            num_blocks=self._num_blocks,
            first_tokens=[token_to_wire(t) for t in first_tokens],
            num_cached_tokens=num_cached_tokens,
        )
        await self._write(kv_pb2.PushRequest(key=self._key, commit=commit))
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(grpc.aio.InternalError):  # the receiver has ended the call: its status says why, this does not
                    await self._call.done_writing()
                await self._call
        except TimeoutError:
            raise DeadlineExceeded(f"no acknowledgement within {self._timeout_s:.1f} s") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def abort(self, reason: str) -> None:
        """Stops writing, and gives the receiver's reservation back as far as it can be reached; its lease does the rest. When it
        returns, the blocks are read no more. Never raises."""
        await self._stop_shipping()
        if self._writer is not None:
            self._writer.close()
        if self._call is not None:
            self._call.cancel()
        try:
            await self._peer.stub.Abort(kv_pb2.AbortRequest(key=self._key, reason=reason), timeout=_ABORT_TIMEOUT_S)
        except grpc.RpcError as error:
            log.info("abort of a transfer did not arrive: %s", error.code().name)

    async def _open(self, link: Link, writer: Writer, num_blocks: int) -> kv_pb2.OpenReply:
        g = self._geometry
        geometry = kv_pb2.KvGeometry(
            digest=g.digest,
            num_layers=g.num_layers,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            block_size=g.block_size,
            kv_dtype=g.kv_dtype,
        )
        request = kv_pb2.OpenRequest(
            key=self._key,
            geometry=geometry,
            num_blocks=num_blocks,
            transport=writer.route.transport,
            link_id=writer.route.link_id,
            writer_id=writer.route.writer_id,
        )
        try:
            reply: kv_pb2.OpenReply = await self._peer.stub.Open(request, timeout=self._timeout_s)
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, Unavailable):  # the receiver is gone, or does not know the link (any more)
                link.discard()
            raise error from None
        return reply

    async def _ship(self, shard: HeadShard, first_block: int, block_ids: Sequence[int], layers: range) -> None:
        assert self._writer is not None, "push() before open()"
        message = kv_pb2.PushRequest(key=self._key)
        chunk = message.chunk  # filled in where it is: a chunk that is put into a message is copied, with all its bytes
        chunk.sequence_number = self._num_chunks
        fill_in(chunk, range(first_block, first_block + len(block_ids)), BlockPart(layers, shard.heads))
        # A task of its own, because a message that is half under way should arrive when this call is cancelled (see `abort`).
        self._shipping = asyncio.create_task(self._writer.ship(chunk, shard.pool, block_ids, lambda: self._write(message)))
        await self._shipped_or_refused(self._shipping)
        if not self._shipping.done():
            self._shipping.cancel()
            await self._raise_status()
        await self._shipping
        self._num_chunks += 1
        metrics.transferred_bytes.labels("sent", self.transport).inc(chunk_bytes(self._geometry, chunk))

    async def _shipped_or_refused(self, shipping: asyncio.Task[None]) -> None:
        """Returns when the chunk is shipped, or the receiver has ended the call."""
        refused = asyncio.create_task(self._call_ended.wait())
        try:
            await asyncio.wait({shipping, refused}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            refused.cancel()

    async def _stop_shipping(self) -> None:
        if self._shipping is None:
            return
        await asyncio.wait({self._shipping}, timeout=_ABORT_TIMEOUT_S)
        self._shipping.cancel()
        await asyncio.gather(self._shipping, return_exceptions=True)

    async def _write(self, message: kv_pb2.PushRequest) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._call.write(message)
        except TimeoutError:
            raise DeadlineExceeded(f"a chunk was not taken within {self._timeout_s:.1f} s") from None
        except (asyncio.InvalidStateError, grpc.RpcError):  # the receiver has ended the call: its status says why, this does not
            await self._raise_status()

    async def _raise_status(self) -> NoReturn:
        # Not by awaiting the call: a chunk's task does this too, and if it is cancelled meanwhile, that would cancel the response
        # for everybody, and the status with it.
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            raise Internal("the receiver ended the transfer before its commit")
        trailing = await self._call.trailing_metadata()
        raise from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, await self._call.details()))
