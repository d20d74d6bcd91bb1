"""A man in the middle of TCP connections to one worker, who can reset, stall, delay and refuse them."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

_PIECE_BYTES = 64 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time


class Relay:
    """Forwards what comes to `port` of this host. A target that is not there looks like one that resets connections."""

    def __init__(self, port: int, target: tuple[str, int]) -> None:
        self.port = port
        self.delay_s = 0.0  # added to each piece, in both directions
        self.is_refusing = False
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._flows.set()
        self.reset()
        await self._server.wait_closed()

    def reset(self) -> None:
        """All connections end with RST."""
        for writer in list(self._writers):
            _reset(writer)

    def stall(self) -> None:
        """Nothing gets through until `flow`; connections stay open, and new ones are accepted."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if not self.is_refusing:
                with suppress(OSError):
                    await self._forward(reader, writer)
        finally:
            self._writers.discard(writer)
            _reset(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side closes; HTTP/2 knows no half-open connections."""
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        self._writers.add(target_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, target_writer)),
            asyncio.create_task(self._pump(target_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers.discard(target_writer)
            _reset(target_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._flows.wait()
            writer.write(piece)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
