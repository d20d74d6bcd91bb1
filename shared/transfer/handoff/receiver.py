"""The receiving end of the handoff: reserve, push, commit, release (DESIGN: one order of events).

    expect(id, request)     the router's Generate stream is open: a transfer of this id may come
    open(key, …)            blocks for the whole prompt are reserved, waiting for room if need be
    receive(key, chunk)     bytes go into the reserved blocks; anything not for the live attempt is refused
    commit(key, manifest)   everything has come: the sequence may run, its first tokens go out
    abort(key) / forget(id) / lease expiry / link lost      the blocks go back

All methods run on one event loop and none of them awaits between checking a reservation and using it, so this process never writes
a block after its reservation has ended. Where the sender itself writes into the blocks (shared memory, CUDA IPC), what an ended
attempt had reserved is first fenced: it stays reserved until the sender can certainly not write to it any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.base.blocks_of import num_blocks_of
from shared.base.errors import CorruptTransfer, IncompatiblePeer, InvalidRequest, Overloaded, StaleTransfer
from shared.base.request import Output, Request
from shared.engine.engine import Engine
from shared.engine.memory.block_part import BlockPart, as_slice
from shared.engine.schedule.sequence import Sequence as EngineSequence
from shared.rpc import kv_pb2
from shared.transfer.handoff import metrics
from shared.transfer.handoff.acceptors import Acceptors
from shared.transfer.handoff.manifest import WrongManifest, check_counts, first_tokens_of
from shared.transfer.transports.chunks import blocks_of, checksum_of, chunk_bytes, part_of
from shared.transfer.transports.grpc import GrpcAcceptor
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import Landing, Payload, Route

log = logging.getLogger(__name__)

# A sender that runs answers within milliseconds. For one that does not, the router should soon try something else.
_FENCE_TIMEOUT_S = 2.0
_GRPC_ROUTE = Route()


@dataclass(slots=True, eq=False)
class _Reservation:
    attempt: int
    sequence: EngineSequence
    route: Route
    landing: Landing
    num_cached_blocks: int
    lease: asyncio.TimerHandle
    missing: NDArray[np.bool_]  # [prompt blocks, layers, KV heads]: what has not come yet
    next_chunk: int = 0


@dataclass(slots=True, eq=False)
class _Expected:
    """One Generate stream that waits for its prompt. `attempt` is the highest seen; lower ones are stale."""

    request: Request
    attempt: int = -1
    reservation: _Reservation | None = None
    fence: asyncio.Future[None] | None = None  # an earlier attempt's blocks wait for it, under the same request id
    room: asyncio.Future[EngineSequence] | None = None  # the engine has been asked for blocks, by the calls that wait for it
    num_waiting: int = 0
    committed: bool = False


class Receiver:
    def __init__(
        self,
        engine: Engine,
        pools: PoolGroup,
        vocab_size: int,
        boot_id: str,
        lease_s: float,
        on_outputs: Callable[[Sequence[Output]], None],
        acceptors: Acceptors | None = None,
    ) -> None:
        """`acceptors` are the transports offered; None: gRPC only."""
        self._engine = engine
        self._pools = pools
        self._geometry = pools.geometry
        self._vocab_size = vocab_size
        self._boot_id = boot_id
        self._lease_s = lease_s
        self._on_outputs = on_outputs
        self.acceptors = acceptors or Acceptors([GrpcAcceptor()])
        self._expected: dict[bytes, _Expected] = {}

    # The life of an expectation: as long as the Generate stream

    def expect(self, transfer_id: bytes, request: Request) -> None:
        if len(transfer_id) != 16:
            raise InvalidRequest(f"transfer_id has {len(transfer_id)} bytes; it must have 16", param="transfer_id")
        if transfer_id in self._expected:
            raise InvalidRequest("transfer_id is in use", param="transfer_id")
        self._expected[transfer_id] = _Expected(request)

    def forget(self, transfer_id: bytes) -> None:
        """The Generate stream has ended: so does its sequence, unless it has finished. Idempotent."""
        expected = self._expected.pop(transfer_id, None)
        if expected is None:
            return
        if expected.reservation is not None:
            self._drop(expected, "abandoned")
        elif expected.fence is None:
            self._engine.abort(expected.request.request_id)
        if expected.room is not None and not expected.room.done():
            expected.room.set_exception(self._stale("the stream ended while its reservation waited", "unknown"))

    # The prefill worker's calls

    async def open(
        self,
        key: kv_pb2.TransferKey,
        geometry: kv_pb2.KvGeometry,
        num_blocks: int,
        timeout_s: float,
        route: Route = _GRPC_ROUTE,
    ) -> kv_pb2.OpenReply:
        self._check_geometry(geometry)
        self.acceptors.find(route.transport)
        expected = self._find(key)
        if expected.committed or key.attempt < expected.attempt:
            raise self._stale(f"attempt {key.attempt} of a transfer that is at attempt {expected.attempt}", "old_attempt")
        if key.attempt > expected.attempt:
            expected.attempt = key.attempt
            if expected.reservation is not None:
                self._drop(expected, "superseded")
        needed = num_blocks_of(len(expected.request.token_ids), self._geometry.block_size)
        if num_blocks != needed:
            raise InvalidRequest(f"num_blocks is {num_blocks}; this prompt has {needed}", param="num_blocks")
        if expected.fence is not None:
            await self._wait_for_fence(expected.fence, timeout_s)
        if expected.reservation is None:
            await self._reserve(key, expected, num_blocks, timeout_s, route)
        reservation = self._live(key)
        if reservation.route != route:
            raise self._stale(f"attempt {key.attempt} is open over another link", "old_attempt")
        granted = await reservation.landing.grant(reservation.sequence.block_table[reservation.num_cached_blocks :])
        self._live(key)  # it may have ended meanwhile
        return kv_pb2.OpenReply(
            num_cached_blocks=reservation.num_cached_blocks,
            lease_s=self._lease_s,
            max_chunk_bytes=reservation.landing.max_chunk_bytes,
            block_ids=granted,
        )

    async def receive(self, key: kv_pb2.TransferKey, chunk: kv_pb2.Chunk) -> None:
        """A chunk's header has come; its bytes are in it, in place, or under way."""
        async with self._check_chunk(key, chunk).landing.arrival(chunk):
            self.apply(key, chunk)

    def apply(self, key: kv_pb2.TransferKey, chunk: kv_pb2.Chunk) -> None:
        """The chunk's bytes are here."""
        reservation = self._check_chunk(key, chunk)
        payload = reservation.landing.payload(chunk)
        if payload is not None:
            self._write(key, reservation, chunk, payload)
        _cells(reservation.missing, blocks_of(chunk), part_of(chunk))[...] = False
        reservation.next_chunk += 1
        metrics.transferred_bytes.labels("received", reservation.landing.transport).inc(chunk_bytes(self._geometry, chunk))
        self._renew(key, reservation)

    def commit(self, key: kv_pb2.TransferKey, commit: kv_pb2.Commit) -> None:
        reservation = self._live(key)
        expected = self._expected[key.transfer_id]
        num_missing = int(reservation.missing.any(axis=(1, 2)).sum())
        if num_missing:
            raise self._corrupt(key, f"commit with {num_missing} blocks missing", "manifest")
        num_due = len(reservation.missing) - reservation.num_cached_blocks
        try:
            check_counts(commit, expected.request, reservation.next_chunk, num_due)
            first_tokens = first_tokens_of(commit, expected.request, self._vocab_size)
        except WrongManifest as error:
            raise self._corrupt(key, str(error), "manifest") from None
        reservation.lease.cancel()
        reservation.landing.close()
        expected.reservation, expected.committed = None, True
        metrics.transfers.labels("committed").inc()
        # What the client was spared is what the prefill worker did not compute.
        self._on_outputs(self._engine.commit(expected.request.request_id, first_tokens, commit.num_cached_tokens))

    def abort(self, key: kv_pb2.TransferKey) -> bool:
        """Gives one attempt's reservation back; True if there was one. A new attempt may still come."""
        expected = self._expected.get(key.transfer_id)
        if key.boot_id != self._boot_id or expected is None or expected.reservation is None:
            return False
        if expected.reservation.attempt != key.attempt:
            return False
        self._drop(expected, "aborted")
        return True

    # Inside

    async def _wait_for_fence(self, fence: asyncio.Future[None], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(min(timeout_s, _FENCE_TIMEOUT_S)):
                await asyncio.shield(fence)
        except TimeoutError:
            metrics.refused.labels("fence").inc()
            raise Overloaded("the earlier attempt's sender does not say that it has stopped writing") from None

    async def _reserve(self, key: kv_pb2.TransferKey, expected: _Expected, num_blocks: int, timeout_s: float, route: Route) -> None:
        sequence = await self._wait_for_room(key, expected, num_blocks, timeout_s)
        if expected.reservation is not None:  # a repeated call of the same attempt won
            return
        try:
            landing = self.acceptors.landing(route, lambda: self._lose(expected))
        except Exception:
            self._give_back(expected)
            raise
        num_cached = sequence.num_cached_tokens // self._geometry.block_size
        missing = np.ones((num_blocks, self._geometry.num_layers, self._geometry.num_kv_heads), dtype=np.bool_)
        missing[:num_cached] = False
        lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, expected)
        expected.reservation = _Reservation(key.attempt, sequence, route, landing, num_cached, lease, missing)

    async def _wait_for_room(
        self, key: kv_pb2.TransferKey, expected: _Expected, num_blocks: int, timeout_s: float
    ) -> EngineSequence:
        """The place in the engine's line is the transfer's: repeated calls and the next attempt wait in it too."""
        room = expected.room = expected.room or self._ask(expected.request)
        expected.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                sequence = await asyncio.shield(room)
            if self._find(key) is not expected or expected.attempt != key.attempt:
                raise self._stale("the transfer moved on while its reservation waited", "superseded")
            if expected.room is room:
                expected.room = None
            elif expected.reservation is None:
                raise self._stale("the attempt was ended while its reservation waited", "aborted")
            return sequence
        except TimeoutError:
            metrics.refused.labels("no_room").inc()
            raise Overloaded(f"no room for {num_blocks} blocks within {timeout_s:.1f} s") from None
        finally:
            expected.num_waiting -= 1
            if expected.room is room and not expected.num_waiting:
                expected.room = None
                self._engine.abort(expected.request.request_id)

    def _ask(self, request: Request) -> asyncio.Future[EngineSequence]:
        loop = asyncio.get_running_loop()
        room: asyncio.Future[EngineSequence] = loop.create_future()
        self._engine.reserve(request, lambda sequence: loop.call_soon_threadsafe(_resolve, room, sequence))
        return room

    def _find(self, key: kv_pb2.TransferKey) -> _Expected:
        if key.boot_id != self._boot_id:
            raise self._stale(f"boot {key.boot_id!r} is not this worker's", "old_boot")
        expected = self._expected.get(key.transfer_id)
        if expected is None:
            raise self._stale("no stream waits for this transfer", "unknown")
        return expected

    def _live(self, key: kv_pb2.TransferKey) -> _Reservation:
        reservation = self._find(key).reservation
        if reservation is None:
            raise self._stale("the transfer has no live reservation", "expired")
        if reservation.attempt != key.attempt:
            raise self._stale(f"attempt {key.attempt} is not the live one, {reservation.attempt}", "old_attempt")
        return reservation

    def _check_chunk(self, key: kv_pb2.TransferKey, chunk: kv_pb2.Chunk) -> _Reservation:
        """The live reservation that the chunk is the next one of. Raises CorruptTransfer if it is not."""
        reservation = self._live(key)
        if chunk.sequence_number != reservation.next_chunk:
            raise self._corrupt(key, f"chunk {chunk.sequence_number} came when {reservation.next_chunk} was due", "order")
        blocks, part = blocks_of(chunk), part_of(chunk)
        stops = (blocks.stop, part.layers.stop, part.heads.stop)
        cells = _cells(reservation.missing, blocks, part)
        is_inside = all(stop <= end for stop, end in zip(stops, reservation.missing.shape, strict=True))
        if not is_inside or not cells.size or not cells.all():
            raise self._corrupt(key, f"blocks {blocks.start}..{blocks.stop - 1} are not all outstanding", "range")
        return reservation

    def _write(self, key: kv_pb2.TransferKey, reservation: _Reservation, chunk: kv_pb2.Chunk, payload: Payload) -> None:
        if reservation.landing.has_checksums and checksum_of(payload) != chunk.checksum:
            raise self._corrupt(key, f"chunk {chunk.sequence_number} does not match its checksum", "checksum")
        block_ids = reservation.sequence.block_table[as_slice(blocks_of(chunk))]
        try:
            self._pools.write_blocks(block_ids, payload, part_of(chunk))
        except CorruptTransfer as error:
            raise self._corrupt(key, error.message, "size") from None

    def _renew(self, key: kv_pb2.TransferKey, reservation: _Reservation) -> None:
        reservation.lease.cancel()
        expected = self._expected[key.transfer_id]
        reservation.lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, expected)

    def _expire(self, expected: _Expected) -> None:
        log.warning("transfer for %s made no progress for %.1f s", expected.request.request_id, self._lease_s)
        self._drop(expected, "expired")

    def _lose(self, expected: _Expected) -> None:
        log.warning("the sender of blocks for %s is gone", expected.request.request_id)
        self._drop(expected, "sender_lost")

    def _drop(self, expected: _Expected, result: str) -> None:
        """The attempt ends. Its blocks go back as soon as nobody can write to them."""
        reservation = expected.reservation
        assert reservation is not None
        reservation.lease.cancel()
        expected.reservation = None
        metrics.transfers.labels(result).inc()
        expected.fence = reservation.landing.fence()
        if expected.fence is None:
            self._give_back(expected)
            return
        num_blocks = len(reservation.missing)
        metrics.quarantined_blocks.inc(num_blocks)
        expected.fence.add_done_callback(lambda _: self._leave_quarantine(expected, num_blocks))

    def _leave_quarantine(self, expected: _Expected, num_blocks: int) -> None:
        metrics.quarantined_blocks.dec(num_blocks)
        expected.fence = None
        self._give_back(expected)

    def _give_back(self, expected: _Expected) -> None:
        self._engine.abort(expected.request.request_id)

    def _stale(self, message: str, cause: str) -> StaleTransfer:
        metrics.refused.labels(cause).inc()
        return StaleTransfer(message)

    def _corrupt(self, key: kv_pb2.TransferKey, message: str, cause: str) -> CorruptTransfer:
        """The attempt has shown that it cannot be trusted: it ends here, and its blocks go back."""
        metrics.refused.labels(cause).inc()
        self._drop(self._expected[key.transfer_id], "corrupt")
        return CorruptTransfer(message)

    def _check_geometry(self, theirs: kv_pb2.KvGeometry) -> None:
        ours = self._geometry
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "kv_dtype"):
            if getattr(theirs, name) != getattr(ours, name):
                metrics.refused.labels("geometry").inc()
                advice = "; give both the same --kv-cache-dtype and --dtype" if name == "kv_dtype" else ""
                raise IncompatiblePeer(f"{name} is {getattr(theirs, name)} at the sender and {getattr(ours, name)} here{advice}")
        if theirs.digest != ours.digest:
            metrics.refused.labels("geometry").inc()
            raise IncompatiblePeer(
                f"digest is {theirs.digest} at the sender and {ours.digest} here: model, weights, --dtype or protocol differ"
            )


def _resolve(room: asyncio.Future[EngineSequence], sequence: EngineSequence) -> None:
    if not room.done():
        room.set_result(sequence)


def _cells(missing: NDArray[np.bool_], blocks: range, part: BlockPart) -> NDArray[np.bool_]:
    """The part of [prompt blocks, layers, heads] that a chunk is for. A view."""
    return missing[as_slice(blocks), as_slice(part.layers), as_slice(part.heads)]
