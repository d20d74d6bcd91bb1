"""An engine under measurement, from its start to the end of all its processes.

start in a session of its own ─> answers 200 at its ready path ─> … ─> SIGTERM ─> SIGKILL to what is left of its group
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bench.compare.engines import Engine
from bench.load.exchange import Endpoint, HttpFailure, exchange
from services.local.launch import launch_command

_LOOK_AGAIN_S = 0.25
_STOP_TIMEOUT_S = 15.0


class EngineFailed(Exception):
    """It ended, or did not become ready in time."""


@asynccontextmanager
async def running(engine: Engine, endpoint: Endpoint, log_path: Path, start_timeout_s: float) -> AsyncIterator[None]:
    """Ready inside, gone after. What it prints goes to `log_path`. Raises EngineFailed."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *launch_command(engine.command),
            env=engine.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _until_ready(engine, process, endpoint, log_path, start_timeout_s)
        yield
    finally:
        await _stop(process)


async def _until_ready(
    engine: Engine, process: asyncio.subprocess.Process, endpoint: Endpoint, log_path: Path, timeout_s: float
) -> None:
    """Asks again and again: other people's engines have no other way to say it."""
    ended = asyncio.create_task(process.wait())
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    try:
        while not await _answers(endpoint, engine.ready_path):
            await asyncio.wait((ended,), timeout=_LOOK_AGAIN_S)
            if ended.done():
                raise EngineFailed(f"ended with exit code {ended.result()}: {last_line(log_path)} (log: {log_path})")
            if asyncio.get_running_loop().time() > deadline_s:
                raise EngineFailed(f"not ready after {timeout_s:g} s (log: {log_path})")
    finally:
        ended.cancel()


async def _answers(endpoint: Endpoint, path: str) -> bool:
    try:
        async with asyncio.timeout(_LOOK_AGAIN_S):
            await exchange(endpoint, "GET", path, b"", lambda _: None)
    except (HttpFailure, TimeoutError):
        return False
    return True


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Its leader is asked; the group's others are killed if they do not end with it."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def last_line(path: Path) -> str:
    """The last that says something, or nothing."""
    lines = path.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
