"""One prompt on its way to the decode worker: what has been computed, what has been sent, and when.

Two coroutines: one notes what the engine says when it says it, the other ships what that allows, and looks again when it has done
so. So a slow network sends few large pieces and a fast one many small ones, each as soon as it can.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import groupby

from shared.base.blocks_of import num_blocks_of
from shared.base.errors import TwostrokeError
from shared.base.request import Output, Token
from shared.base.worker_info import KvGeometry
from shared.engine.schedule.plan import Event, Failure, Progress
from shared.engine.schedule.sequence import Sequence
from shared.rpc import control_pb2
from shared.transfer.handoff import metrics
from shared.transfer.handoff.sender import Sender
from shared.worker.streams import Mailbox

_LEAST_EARLY_BYTES = 1024 * 1024  # some layers that are less than this are not worth a message while the others are computed


class ShippedLayers:
    """How many layers of each block have been sent: always the first ones."""

    def __init__(self, num_blocks: int, num_layers: int, num_cached_blocks: int) -> None:
        """The receiver has all layers of the first `num_cached_blocks`."""
        self._num_layers = [num_layers] * num_cached_blocks + [0] * (num_blocks - num_cached_blocks)

    def missing(self, num_blocks: int, num_layers: int) -> list[tuple[range, range]]:
        """The (blocks, layers) to send until the first `num_blocks` have so many layers, in order."""
        return list(self._missing(num_blocks, num_layers))

    def add(self, blocks: range, layers: range) -> None:
        """These are being sent."""
        for block in blocks:
            assert self._num_layers[block] == layers.start, "a layer is sent twice or left out"
            self._num_layers[block] = layers.stop

    def _missing(self, num_blocks: int, num_layers: int) -> Iterator[tuple[range, range]]:
        for num_sent, run in groupby(range(num_blocks), key=lambda block: self._num_layers[block]):
            blocks = list(run)
            if num_sent < num_layers:
                yield range(blocks[0], blocks[-1] + 1), range(num_sent, num_layers)


class Shipment:
    def __init__(self, sequence: Sequence, sender: Sender, geometry: KvGeometry) -> None:
        """`geometry` is the whole model's."""
        self._sequence = sequence
        self._sender = sender
        self._geometry = geometry
        self._num_tokens = len(sequence.request.token_ids)
        self._num_blocks = self._num_complete_blocks(self._num_tokens)
        self._shipped = ShippedLayers(self._num_blocks, geometry.num_layers, 0)
        # What the engine has said so far
        self._complete = 0  # tokens of which all layers are computed
        self._partial = Progress(sequence.id, 0, 0)  # more tokens, and how many layers of them
        self._first_tokens: dict[int, Token] = {}
        self._computed_at = 0.0
        self._failure: TwostrokeError | None = None
        self._news = asyncio.Event()

    async def run(self, mailbox: Mailbox) -> control_pb2.PrefillReply:
        arrived_at = time.monotonic()
        reading = asyncio.create_task(self._read(mailbox))
        try:
            await self._wait_for_news()  # the first chunk starts
            started_at = time.monotonic()
            num_cached_blocks = await self._sender.open(self._num_blocks)
            self._shipped = ShippedLayers(self._num_blocks, self._geometry.num_layers, num_cached_blocks)
            while not self._is_computed:
                self._check()
                await self._push_computed()  # at first, what was in the cache
                await self._wait_for_news()
        finally:
            reading.cancel()
        await self._push(self._num_blocks, self._geometry.num_layers)
        await self._sender.commit([token for _, token in sorted(self._first_tokens.items())], self._sequence.num_cached_tokens)
        done_at = time.monotonic()
        metrics.transfer_seconds.labels(self._sender.transport).observe(done_at - self._computed_at)
        return control_pb2.PrefillReply(
            num_cached_tokens=self._sequence.num_cached_tokens,
            num_shipped_blocks=self._sender.num_shipped_blocks,
            queue_s=started_at - arrived_at,
            compute_s=self._computed_at - started_at,
            transfer_s=done_at - self._computed_at,
        )

    @property
    def _is_computed(self) -> bool:
        return len(self._first_tokens) == self._sequence.request.sampling.n

    async def _read(self, mailbox: Mailbox) -> None:
        """Notes things also while blocks are being pushed: else the time that takes would count as the prompt's computation."""
        while not self._is_computed and self._failure is None:
            for event in await mailbox.take():
                self._note(event)
            self._news.set()

    def _note(self, event: Event) -> None:
        if isinstance(event, Failure):
            self._failure = event.error
        elif isinstance(event, Output):
            self._first_tokens[event.choice] = event.tokens[0]
            self._computed_at = time.monotonic()
        elif event.num_layers is None:
            self._complete = event.num_computed_tokens
        else:
            self._partial = event

    async def _wait_for_news(self) -> None:
        await self._news.wait()
        self._news.clear()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _push_computed(self) -> None:
        await self._push(self._num_complete_blocks(self._complete), self._geometry.num_layers)
        num_blocks, num_layers = self._num_complete_blocks(self._partial.num_computed_tokens), self._partial.num_layers or 0
        num_due = sum(len(blocks) * len(layers) for blocks, layers in self._shipped.missing(num_blocks, num_layers))
        if num_due * self._geometry.block_bytes >= _LEAST_EARLY_BYTES * self._geometry.num_layers:
            await self._push(num_blocks, num_layers)

    async def _push(self, num_blocks: int, num_layers: int) -> None:
        """Until the first `num_blocks` have been sent with so many layers."""
        for blocks, layers in self._shipped.missing(num_blocks, num_layers):
            self._shipped.add(blocks, layers)
            await self._sender.push(blocks.start, self._sequence.block_table[blocks.start : blocks.stop], layers)

    def _num_complete_blocks(self, num_tokens: int) -> int:
        """How many blocks these tokens complete. The prompt's last block counts as complete with its last token."""
        if num_tokens == self._num_tokens:
            return num_blocks_of(num_tokens, self._geometry.block_size)
        return num_tokens // self._geometry.block_size
