"""A real Redis-compatible server for tests, that can be killed, frozen and started again empty."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest_asyncio

from services.local.valkey import ValkeyAddress, ValkeyServer


class TestValkey(ValkeyServer):
    """An embedded server on a unix socket, with the faults that tests need."""

    __test__ = False

    @property
    def url(self) -> str:
        return self.address.url

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.stop()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


@pytest_asyncio.fixture
async def valkey() -> AsyncIterator[TestValkey]:
    with tempfile.TemporaryDirectory(prefix="valkey-") as folder:  # a short path: socket names are limited to 107 bytes
        server = TestValkey(ValkeyAddress(unix_socket=Path(folder, "socket")))
        await server.start()
        yield server
        server.thaw()
        await server.stop()
