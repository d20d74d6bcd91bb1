"""gRPC channels to peers: opened at the first call, kept while they are used, closed when they have been idle for a while.

A channel with a call under way is never closed, so a stream lasts as long as its peer, however many peers there are. How many
channels are open follows from how many peers were called within the last minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from shared.base.errors import Unavailable
from shared.options.peers import PeerConfig
from shared.wire.cluster_secret import metadata_of, read_cluster_secret
from shared.wire.settings import GRPC_OPTIONS, read_file

_IDLE_S = 60.0


class Channels:
    def __init__(self, config: PeerConfig, idle_s: float = _IDLE_S) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._credentials = _credentials(config)
        self._metadata = metadata_of(read_cluster_secret(config))
        self._idle_s = idle_s
        self._connections: OrderedDict[str, _Connection] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def get(self, address: str) -> PeerChannel:
        """The channel to host:port: for stubs, and to keep as long as one likes."""
        return PeerChannel(self, address)

    @property
    def num_open(self) -> int:
        return len(self._connections)

    def call(self, address: str, kind: str, method: str, codecs: dict[str, Any], args: Any, timeout_s: float | None) -> Any:
        """Starts a call. `kind` is the name of a channel's method that makes such calls. Raises Unavailable after `close`."""
        if self._is_closed:
            raise Unavailable("this process is stopping")
        self._close_an_idle_one()
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(self._open(address))
        return connection.call(kind, method, codecs, args, timeout=timeout_s, metadata=self._metadata)

    async def close(self) -> None:
        """Ends the calls under way too."""
        self._is_closed = True
        while self._connections:
            self._close(self._connections.popitem()[1])
        await asyncio.gather(*self._closing)

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=GRPC_OPTIONS)

    def _close_an_idle_one(self) -> None:
        """Looks at one channel, each time at the next: as often as one may be opened, one is looked at."""
        if self._connections:
            address, connection = self._connections.popitem(last=False)
            if connection.num_calls == 0 and time.monotonic() - connection.used_at >= self._idle_s:
                self._close(connection)
            else:
                self._connections[address] = connection

    def _close(self, connection: _Connection) -> None:
        task = asyncio.ensure_future(connection.channel.close(None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class PeerChannel:
    """What a generated stub needs of a channel. Each call takes the connection that is open then."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._channels = channels
        self._address = address

    def unary_unary(self, method: str, **codecs: Any) -> Callable[..., Any]:
        return self._caller("unary_unary", method, codecs)

    def unary_stream(self, method: str, **codecs: Any) -> Callable[..., Any]:
        return self._caller("unary_stream", method, codecs)

    def stream_unary(self, method: str, **codecs: Any) -> Callable[..., Any]:
        return self._caller("stream_unary", method, codecs)

    def _caller(self, kind: str, method: str, codecs: dict[str, Any]) -> Callable[..., Any]:
        def start(*args: Any, timeout: float | None = None) -> Any:
            return self._channels.call(self._address, kind, method, codecs, args, timeout)

        return start


class _Connection:
    """A gRPC channel and the number of its calls under way."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_calls = 0
        self.used_at = time.monotonic()

    def call(self, kind: str, method: str, codecs: dict[str, Any], args: Any, **options: Any) -> Any:
        call = getattr(self.channel, kind)(method, **codecs)(*args, **options)
        self.num_calls += 1
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: Any) -> None:
        self.num_calls -= 1
        self.used_at = time.monotonic()


def _credentials(config: PeerConfig) -> grpc.ChannelCredentials | None:
    if not config.tls_ca:
        return None
    return grpc.ssl_channel_credentials(read_file(config.tls_ca), read_file(config.tls_key), read_file(config.tls_cert))
