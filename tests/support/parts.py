"""Single `twostroke` processes, as an operator of several machines runs them, and the faults that can befall a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from services.local.launch import launch_command
from shared.process.readiness import READY, READY_FD_VARIABLE

READY_TIMEOUT_S = 120.0
_KILL_AFTER_S = 20.0


def free_ports(count: int) -> list[int]:
    """Different ones, all free a moment ago."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def service_command(role: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "services.cli", role)


class Part:
    """One process that can be started again after it has ended. Its output goes to `log_path`."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._command = command
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def flag(self, name: str) -> str:
        """The value that follows a flag in the command."""
        return self._command[self._command.index(name) + 1]

    async def start(self) -> None:
        """Returns when the process says that it is ready. Fails with its last output if it ends before."""
        await self.spawn()
        async with asyncio.timeout(READY_TIMEOUT_S):
            await self.wait_ready()

    async def spawn(self) -> None:
        news, news_in_child = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *launch_command(tuple(self._command)),  # which makes it end with this process, however that ends
                    env={**self._environ, READY_FD_VARIABLE: str(news_in_child)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(news_in_child,),
                    process_group=0,
                )
        finally:
            os.close(news_in_child)
        self._news = news

    async def wait_ready(self) -> None:
        """Once for each `spawn`."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe = os.fdopen(self._news, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        try:
            async for line in reader:
                if line.strip().decode() == READY:
                    return
        finally:
            transport.close()
        raise AssertionError(f"{self.name} ended before it was ready:\n{self.last_output()}")

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait()

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help; also where it is stopped or was never started."""
        if not self.is_running:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_KILL_AFTER_S):
                await self.wait()
        except TimeoutError:
            await self.kill()

    def last_output(self, num_lines: int = 20) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])


@asynccontextmanager
async def started(*parts: Part) -> AsyncIterator[None]:
    """All at once, and stopped all at once."""
    try:
        await asyncio.gather(*(part.start() for part in parts))
        yield
    finally:
        await asyncio.gather(*(part.stop() for part in parts))
