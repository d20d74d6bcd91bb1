"""How bytes travel, apart from what they mean. A transport is four small classes, two at each end.

    sender                                   receiver
    Connector ── connect ──────────────────> Acceptor    one per transport and process: what it can do
       Link ═════════════════════════════════            one per pair of processes
         Writer ─────────────────────────────> Landing   one per transfer attempt

The control messages (open, the headers of chunks in order, commit, abort) go over gRPC for every transport. A transport only brings
the bytes of a chunk into blocks that the receiver has reserved, or to where the receiver puts them there itself.

Words:
    attempt      one try of a prefill worker to bring one prompt; a later one of the same transfer has a higher number
    reservation  the blocks that an attempt has at the receiver, under a lease that every chunk renews
    writer       the sender's end of an attempt: what writes its blocks
    landing      the receiver's end of an attempt: where its bytes come down
    route        which link, and which writer on it, an attempt uses
    announce     to send a chunk's header: its bytes are there, or follow now
    fence        the receiver's order that a writer stop, and the proof that it has stopped
    quarantine   what an ended attempt's blocks are in until its fence is passed: neither used nor free
    message number   counts the bytes that a communicator sends, so that headers (gRPC) and bytes find each other

Two promises make reuse of a block safe. A `Writer` that is closed writes no more. And a `Landing` says, by its `fence`, when nobody
can write to its blocks any more; before that they are not given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shared.base.errors import Unavailable
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2

GRPC, SHM, CUDA_IPC, NCCL, GLOO = "grpc", "shm", "cuda-ipc", "nccl", "gloo"

Announce = Callable[[], Awaitable[None]]  # sends the chunk, as it is filled in now, to the receiver
Payload = bytes | memoryview | Tensor


class LinkLost(Unavailable):
    """The link of a transfer is gone, or cannot be made. The next transfer makes a new one, perhaps of another kind."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A receiver, as its sender reaches it."""

    stub: Any  # KvTransferStub
    boot_id: str


@dataclass(frozen=True, slots=True)
class Route:
    """Which link of which transport an attempt uses, and its number there: how the receiver knows what belongs together."""

    transport: str = GRPC
    link_id: bytes = b""
    writer_id: int = 0


# The sender's end


class Writer(Protocol):
    """One attempt. Made before `Open` is sent, so that the receiver may end the attempt at any time after."""

    @property
    def route(self) -> Route: ...

    def opened(self, reply: kv_pb2.OpenReply) -> None:
        """The receiver has reserved the blocks."""

    async def ship(self, chunk: kv_pb2.Chunk, pool: KvPool, block_ids: Sequence[int], announce: Announce) -> None:
        """Moves the chunk's layers of `block_ids` of `pool` as the chunk's blocks, fills in its fields and announces it, in
        the order that the transport needs. When it returns, the blocks have been read. Raises LinkLost or StaleTransfer."""

    def close(self) -> None:
        """Nothing is written after this. Idempotent."""


class Link(Protocol):
    @property
    def is_alive(self) -> bool: ...

    def writer(self) -> Writer: ...

    def discard(self) -> None:
        """Ends the link and every writer on it. Idempotent."""


class Connector(Protocol):
    name: str

    async def connect(self, peer: Peer, offer: kv_pb2.Offer) -> Link:
        """Raises LinkLost if the two cannot reach each other this way."""


# The receiver's end


class Landing(Protocol):
    """One attempt. Dropping it takes a `close` after the commit, or a `fence` in every other case."""

    transport: str
    max_chunk_bytes: int
    has_checksums: bool

    async def grant(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Which of the reserved blocks the sender must know. Returns when they may be written to."""

    def arrival(self, chunk: kv_pb2.Chunk) -> AbstractAsyncContextManager[None]:
        """Inside, the chunk's bytes are here and `payload` gives them. Raises LinkLost or CorruptTransfer."""

    def payload(self, chunk: kv_pb2.Chunk) -> Payload | None:
        """The chunk's bytes; None: they are in the blocks already."""

    def close(self) -> None:
        """The sender has said that it wrote all it had to."""

    def fence(self) -> asyncio.Future[None] | None:
        """Bars the sender. None: nobody can write to the blocks from now on; else a future that is done when nobody can."""


class Acceptor(Protocol):
    name: str

    def offer(self) -> kv_pb2.Offer: ...

    def landing(self, route: Route, on_lost: Callable[[], None]) -> Landing:
        """`on_lost` is called if the link ends before the landing is closed or fenced. Raises LinkLost for an unknown link."""

    async def close(self) -> None: ...
