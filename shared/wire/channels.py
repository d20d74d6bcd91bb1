"""gRPC channels to peers, opened on demand and kept. Bounded: the least recently used one is closed first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from shared.options.worker import TlsConfig
from shared.wire.serving import open_channel

_MAX_CHANNELS = 256


class Channels:
    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._channels: OrderedDict[str, Any] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> Any:
        """The channel to host:port; connects when first used, and again after the peer was away."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, self._tls)
        self._channels.move_to_end(address)
        if len(self._channels) > _MAX_CHANNELS:
            self._close(self._channels.popitem(last=False)[1])
        return channel

    def drop(self, address: str) -> None:
        """The peer at this address is gone for good."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            self._close(channel)

    async def close(self) -> None:
        while self._channels:
            self._close(self._channels.popitem()[1])
        await asyncio.gather(*self._closing)

    def _close(self, channel: Any) -> None:
        task = asyncio.ensure_future(channel.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
