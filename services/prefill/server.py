"""The Prefill service: compute a prompt, ship its blocks while the rest is computed, sample the first token, commit.

    submit(hold) ─> first chunk starts ─> Open ─┐
                    chunk computed ────────────>├─ Push finished blocks      (the next chunk computes meanwhile)
                    chunk computed ────────────>├─ Push finished blocks
                    first tokens ──────────────>└─ Push the rest, Commit ─> acknowledged ─> release

The call owns the sequence and its reservation at the receiver. If it ends early, both are given back.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from shared.channels import Channels
from shared.engine.engine import Engine
from shared.engine.plan import Event, Failure
from shared.engine.sequence import Sequence
from shared.errors import InvalidRequest, TwostrokeError, Unavailable
from shared.request import Output, Token
from shared.rpc import control_pb2, control_pb2_grpc
from shared.streams import Streams
from shared.transfer import metrics
from shared.transfer.heads import HeadShard
from shared.transfer.links import Links
from shared.transfer.sender import Sender
from shared.wire import request_from_wire
from shared.worker import Worker


class PrefillService(control_pb2_grpc.PrefillServicer):
    def __init__(self, worker: Worker, engine: Engine, streams: Streams[Event], channels: Channels, links: Links) -> None:
        self._worker = worker
        self._engine = engine
        self._streams = streams
        self._channels = channels
        self._links = links

    async def Prefill(self, message: control_pb2.PrefillRequest, context: Any) -> control_pb2.PrefillReply:
        if self._worker.is_draining:
            raise Unavailable("this worker is draining")
        request = request_from_wire(message.sequence)
        self._worker.check_tokens(request)
        _check(message.destination)
        worker = self._worker
        channel = self._channels.get(message.destination.address)
        shards = [HeadShard(worker.pool)]
        timeout_s = worker.config.transfer_timeout_s
        sender = Sender(self._links, channel, message.destination, worker.geometry, shards, timeout_s)
        events = self._streams.open(request.request_id)
        try:
            sequence = self._engine.submit(request, hold=True)
            reply = await _Shipment(sequence, sender, worker.geometry.block_size).run(events)
            self._engine.release(request.request_id)
            return reply
        except BaseException as error:
            # Blocks are being read until the sender has stopped: stop it first, then free them.
            await asyncio.shield(sender.abort(type(error).__name__))
            raise
        finally:
            self._streams.close(request.request_id)
            self._engine.abort(request.request_id)


def _check(destination: control_pb2.Destination) -> None:
    if len(destination.transfer_id) != 16:
        raise InvalidRequest("destination.transfer_id must have 16 bytes", param="transfer_id")
    host, _, port = destination.address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidRequest(f"destination.address is {destination.address!r}; it must be host:port", param="address")


class _Shipment:
    """One prompt on its way: what has been computed, what has been sent, and when."""

    def __init__(self, sequence: Sequence, sender: Sender, block_size: int) -> None:
        self._sequence = sequence
        self._sender = sender
        self._block_size = block_size
        self._num_blocks = -(-len(sequence.request.token_ids) // block_size)
        self._next_block = 0
        # What the engine has said so far
        self._num_computed_tokens = 0
        self._first_tokens: dict[int, Token] = {}
        self._computed_s = 0.0
        self._failure: TwostrokeError | None = None
        self._news = asyncio.Event()

    async def run(self, events: asyncio.Queue[Event]) -> control_pb2.PrefillReply:
        arrived_s = time.monotonic()
        reading = asyncio.create_task(self._read(events))
        try:
            await self._wait_for_news()  # the first chunk starts
            started_s = time.monotonic()
            self._next_block = await self._sender.open(self._num_blocks)
            while not self._is_computed:
                self._check()
                await self._push_up_to(self._num_computed_tokens // self._block_size)  # at first, what was in the cache
                await self._wait_for_news()
        finally:
            reading.cancel()
        await self._push_up_to(self._num_blocks)
        await self._sender.commit([token for _, token in sorted(self._first_tokens.items())], self._sequence.num_cached_tokens)
        done_s = time.monotonic()
        metrics.transfer_seconds.labels(self._sender.transport).observe(done_s - self._computed_s)
        return control_pb2.PrefillReply(
            num_cached_tokens=self._sequence.num_cached_tokens,
            num_shipped_blocks=self._sender.num_shipped_blocks,
            queue_s=started_s - arrived_s,
            compute_s=self._computed_s - started_s,
            transfer_s=done_s - self._computed_s,
        )

    @property
    def _is_computed(self) -> bool:
        return len(self._first_tokens) == self._sequence.request.sampling.n

    async def _read(self, events: asyncio.Queue[Event]) -> None:
        """Notes what the engine says when it says it, also while blocks are being pushed: else the time that takes would count as
        the prompt's computation."""
        while not self._is_computed and self._failure is None:
            event = await events.get()
            if isinstance(event, Failure):
                self._failure = event.error
            elif isinstance(event, Output):
                self._first_tokens[event.choice] = event.tokens[0]
                self._computed_s = time.monotonic()
            else:
                self._num_computed_tokens = event.num_computed_tokens
            self._news.set()

    async def _wait_for_news(self) -> None:
        await self._news.wait()
        self._news.clear()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _push_up_to(self, end: int) -> None:
        if end > self._next_block:
            begin, self._next_block = self._next_block, end
            await self._sender.push(begin, self._sequence.block_table[begin:end])
