"""The receiving end of the handoff: reserve, push, commit, release (DESIGN: one order of events).

    expect(id, request)     the router's Generate stream is open: a transfer of this id may come
    open(key, …)            blocks for the whole prompt are reserved, waiting for room if need be
    apply(key, chunk)       bytes go into the reserved blocks; anything not for the live attempt is refused
    commit(key, manifest)   everything has come: the sequence may run, its first tokens go out
    abort(key) / forget(id) / lease expiry          the blocks go back

All methods run on one event loop and none of them awaits between checking a reservation and using it, so a block can never be
written after its reservation has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from shared.engine.engine import Engine
from shared.engine.kv_pool import KvPool
from shared.engine.plan import SampledToken
from shared.engine.sequence import Sequence as EngineSequence
from shared.errors import CorruptTransfer, IncompatiblePeer, InvalidRequest, Overloaded, StaleTransfer
from shared.request import Output, Request
from shared.rpc import kv_pb2
from shared.transfer import metrics
from shared.worker_info import KvGeometry

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Reservation:
    attempt: int
    sequence: EngineSequence
    num_blocks: int
    num_cached_blocks: int
    lease: asyncio.TimerHandle
    next_chunk: int = 0
    missing: set[int] = field(default_factory=set)  # indices of prompt blocks that have not come yet


@dataclass(slots=True, eq=False)
class _Expected:
    """One Generate stream that waits for its prompt. `attempt` is the highest seen; lower ones are stale."""

    request: Request
    attempt: int = -1
    reservation: _Reservation | None = None
    committed: bool = False


class Receiver:
    def __init__(
        self,
        engine: Engine,
        pool: KvPool,
        geometry: KvGeometry,
        boot_id: str,
        lease_s: float,
        on_outputs: Callable[[Sequence[Output]], None],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._geometry = geometry
        self._boot_id = boot_id
        self._lease_s = lease_s
        self._on_outputs = on_outputs
        self._expected: dict[bytes, _Expected] = {}
        self._queue = asyncio.Lock()  # who waits for room does so in order of arrival
        self._room = asyncio.Event()

    # The life of an expectation: as long as the Generate stream

    def expect(self, transfer_id: bytes, request: Request) -> None:
        if len(transfer_id) != 16:
            raise InvalidRequest(f"transfer_id has {len(transfer_id)} bytes; it must have 16", param="transfer_id")
        if transfer_id in self._expected:
            raise InvalidRequest("transfer_id is in use", param="transfer_id")
        self._expected[transfer_id] = _Expected(request)

    def forget(self, transfer_id: bytes) -> None:
        """The Generate stream has ended. Idempotent; the engine's sequence is the stream's to abort."""
        expected = self._expected.pop(transfer_id, None)
        if expected is not None and expected.reservation is not None:
            self._drop(expected, "abandoned")

    def notify_room(self) -> None:
        """Blocks may have been freed: whoever waits for room looks again."""
        self._room.set()

    # The prefill worker's calls

    async def open(
        self, key: kv_pb2.TransferKey, geometry: kv_pb2.KvGeometry, num_blocks: int, timeout_s: float
    ) -> kv_pb2.OpenReply:
        self._check_geometry(geometry)
        expected = self._find(key)
        if expected.committed or key.attempt < expected.attempt:
            raise self._stale(f"attempt {key.attempt} of a transfer that is at attempt {expected.attempt}", "old_attempt")
        if key.attempt > expected.attempt:
            expected.attempt = key.attempt
            if expected.reservation is not None:
                self._drop(expected, "superseded")
        needed = -(-len(expected.request.token_ids) // self._geometry.block_size)
        if num_blocks != needed:
            raise InvalidRequest(f"num_blocks is {num_blocks}; this prompt has {needed}", param="num_blocks")
        if expected.reservation is None:
            await self._reserve(key, expected, num_blocks, timeout_s)
        reservation = self._live(key)
        return kv_pb2.OpenReply(
            num_cached_blocks=reservation.num_cached_blocks, lease_s=self._lease_s, max_chunk_bytes=MAX_CHUNK_BYTES
        )

    def apply(self, key: kv_pb2.TransferKey, chunk: kv_pb2.Chunk) -> None:
        reservation = self._live(key)
        indices = range(chunk.first_block, chunk.first_block + chunk.num_blocks)
        if chunk.sequence_number != reservation.next_chunk:
            raise self._corrupt(key, f"chunk {chunk.sequence_number} came when {reservation.next_chunk} was due", "order")
        if not indices or not reservation.missing.issuperset(indices):
            raise self._corrupt(key, f"blocks {indices.start}..{indices.stop - 1} are not all outstanding", "range")
        if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
            raise self._corrupt(key, f"chunk {chunk.sequence_number} does not match its checksum", "checksum")
        block_ids = reservation.sequence.block_table[indices.start : indices.stop]
        try:
            self._pool.write_blocks(block_ids, chunk.data, chunk.first_layer, chunk.num_layers, chunk.first_head, chunk.num_heads)
        except CorruptTransfer as error:
            raise self._corrupt(key, error.message, "size") from None
        reservation.missing.difference_update(indices)
        reservation.next_chunk += 1
        metrics.transferred_bytes.labels("received", "grpc").inc(len(chunk.data))
        self._renew(key, reservation)

    def commit(self, key: kv_pb2.TransferKey, commit: kv_pb2.Commit, first_tokens: Sequence[SampledToken]) -> None:
        reservation = self._live(key)
        expected = self._expected[key.transfer_id]
        if reservation.missing or commit.num_chunks != reservation.next_chunk:
            raise self._corrupt(
                key,
                f"commit after {reservation.next_chunk} of {commit.num_chunks} chunks, {len(reservation.missing)} blocks missing",
                "manifest",
            )
        if len(first_tokens) != expected.request.sampling.n:
            raise self._corrupt(key, f"commit has {len(first_tokens)} first tokens for n={expected.request.sampling.n}", "manifest")
        reservation.lease.cancel()
        expected.reservation, expected.committed = None, True
        metrics.transfers.labels("committed").inc()
        outputs = self._engine.commit(expected.request.request_id, first_tokens)
        # What the client was spared is what the prefill worker did not compute.
        self._on_outputs([replace(o, num_cached_tokens=commit.num_cached_tokens) for o in outputs])

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

    async def _reserve(self, key: kv_pb2.TransferKey, expected: _Expected, num_blocks: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._queue:
                while True:
                    if self._find(key) is not expected or expected.attempt != key.attempt:
                        raise self._stale("the transfer moved on while its reservation waited", "superseded")
                    if expected.reservation is not None:  # a repeated call of the same attempt won
                        return
                    self._room.clear()
                    sequence = self._engine.reserve(expected.request)
                    if sequence is not None:
                        break
                    await self._room.wait()
        except TimeoutError:
            metrics.refused.labels("no_room").inc()
            raise Overloaded(f"no room for {num_blocks} blocks within {timeout_s:.1f} s") from None
        num_cached = sequence.num_cached_tokens // self._geometry.block_size
        lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, expected)
        missing = set(range(num_cached, num_blocks))
        expected.reservation = _Reservation(key.attempt, sequence, num_blocks, num_cached, lease, missing=missing)

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

    def _renew(self, key: kv_pb2.TransferKey, reservation: _Reservation) -> None:
        reservation.lease.cancel()
        expected = self._expected[key.transfer_id]
        reservation.lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire, expected)

    def _expire(self, expected: _Expected) -> None:
        log.warning("transfer for %s made no progress for %.1f s", expected.request.request_id, self._lease_s)
        self._drop(expected, "expired")

    def _drop(self, expected: _Expected, result: str) -> None:
        assert expected.reservation is not None
        expected.reservation.lease.cancel()
        expected.reservation = None
        self._engine.abort(expected.request.request_id)
        metrics.transfers.labels(result).inc()
        self.notify_room()

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
                raise IncompatiblePeer(f"{name} is {getattr(theirs, name)} at the sender and {getattr(ours, name)} here")
        if theirs.digest != ours.digest:
            metrics.refused.labels("geometry").inc()
            raise IncompatiblePeer(
                f"digest is {theirs.digest} at the sender and {ours.digest} here: model, weights or protocol differ"
            )
