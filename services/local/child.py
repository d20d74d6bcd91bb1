"""One supervised process, from its start to its end.

    spawn ─> progress … ─> ready ─> output … ─> exit
             (readiness pipe)       (log file, and each line to the observer)

A child leads a process group of its own: the terminal's Ctrl-C reaches only the supervisor, and what a child leaves behind
when it ends is ended with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.local.launch import launch_command
from services.local.log_file import LogFile
from shared.process.readiness import PROGRESS, READY, READY_FD_VARIABLE

_CHUNK_BYTES = 64 * 1024
_LAST_OUTPUT_TIMEOUT_S = 0.5  # to read what a process printed before it ended


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `environ` is the whole environment; it may hold secrets and is never shown.

    The child is ready when it says so (`shared/process/readiness.py`), or, if `ready_text` is not empty, when it prints that.
    """

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False)
    log_path: Path | None  # None: its output is not kept
    cpus: tuple[int, ...] = ()  # cores it may use; empty: all
    ready_text: str = ""
    stop_stage: int = 0  # children of a lower stage are stopped first


class Observer(Protocol):
    """Who is told what happens to children."""

    def progress(self, name: str, text: str) -> None: ...

    def ready(self, name: str, elapsed_s: float) -> None: ...

    def printed(self, name: str, line: str) -> None: ...

    def trouble(self, name: str, text: str) -> None: ...

    def ended(self, name: str, reason: str, restart_in_s: float) -> None: ...


class Child:
    """A running process. `last_line` is the newest line it printed; `on_ready` is called once, when it does its work."""

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, observer: Observer, on_ready: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.last_line = ""
        self._process = process
        self._observer = observer
        self._on_ready = on_ready
        self._is_ready = False
        self._started_at = asyncio.get_running_loop().time()
        self._readers: list[asyncio.Task[None]] = []

    @classmethod
    async def spawn(cls, spec: ChildSpec, observer: Observer, on_ready: Callable[[], None]) -> Child:
        """Raises OSError where the system has no process, descriptor or memory left."""
        with ExitStack() as ours, ExitStack() as in_child:
            output, output_in_child = _pipe(ours, in_child)
            news, news_in_child = _pipe(ours, in_child)
            process = await asyncio.create_subprocess_exec(
                *launch_command(spec.command, spec.cpus),
                env={**spec.environ, READY_FD_VARIABLE: str(news_in_child)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output_in_child,
                stderr=output_in_child,
                pass_fds=(news_in_child,),
                process_group=0,
            )
            ours.pop_all()  # the readers close them
        child = cls(spec, process, observer, on_ready)
        child._readers = [asyncio.create_task(child._read_output(output)), asyncio.create_task(child._read_news(news))]
        return child

    @property
    def uptime_s(self) -> float:
        return asyncio.get_running_loop().time() - self._started_at

    async def wait(self) -> int:
        """The exit code, negative for a signal, once the process and its group are gone and its output is read."""
        exit_code = await self._process.wait()
        self.kill()
        _, unfinished = await asyncio.wait(self._readers, timeout=_LAST_OUTPUT_TIMEOUT_S)
        for reader in unfinished:
            reader.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        return exit_code

    def terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_output(self, fd: int) -> None:
        log = LogFile(self.spec.log_path, lambda text: self._observer.trouble(self.spec.name, text))
        with closing(log):
            async for line in _lines(fd):
                log.write(line)
                self.last_line = line.strip() or self.last_line
                self._observer.printed(self.spec.name, line)
                if self.spec.ready_text and self.spec.ready_text in line:
                    self._set_ready()

    async def _read_news(self, fd: int) -> None:
        async for line in _lines(fd):
            if line == READY:
                self._set_ready()
            elif line.startswith(PROGRESS):
                self._observer.progress(self.spec.name, line.removeprefix(PROGRESS))

    def _set_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._observer.ready(self.spec.name, self.uptime_s)
            self._on_ready()


def _pipe(ours: ExitStack, in_child: ExitStack) -> tuple[int, int]:
    """Its two ends; each stack closes one."""
    read_end, write_end = os.pipe()
    ours.callback(os.close, read_end)
    in_child.callback(os.close, write_end)
    return read_end, write_end


async def _lines(fd: int) -> AsyncIterator[str]:
    """Lines from a pipe until all its writers are gone; an overlong line comes in pieces. Closes `fd`."""
    reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", buffering=0))
    try:
        rest = b""
        while chunk := await reader.read(_CHUNK_BYTES):
            *complete, rest = (rest + chunk).split(b"\n")
            if len(rest) > _CHUNK_BYTES:
                complete, rest = [*complete, rest], b""
            for line in complete:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")
    finally:
        transport.close()
