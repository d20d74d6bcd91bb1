"""Channels to peers: no call is cut by the closing of a channel, however many peers there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from shared.base.errors import Unavailable
from shared.options.peers import PeerConfig
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.channels import Channels
from shared.wire.serving import Server
from tests.support.eventually import eventually

STATUS = control_pb2.GetStatusRequest()


class Worker(control_pb2_grpc.WorkerServicer, control_pb2_grpc.DecodeServicer):
    """Generates one token each time `more` is set."""

    def __init__(self) -> None:
        self.more = asyncio.Event()

    async def GetStatus(self, request: Any, context: Any) -> control_pb2.WorkerStatus:
        return control_pb2.WorkerStatus(worker_id="w")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[control_pb2.GenerateReply]:
        while True:
            await self.more.wait()
            self.more.clear()
            yield control_pb2.GenerateReply()


@asynccontextmanager
async def served(config: PeerConfig | None = None, host: str = "127.0.0.1") -> AsyncIterator[tuple[Worker, str]]:
    worker, server = Worker(), Server(config or PeerConfig())
    server.add(control_pb2_grpc.add_WorkerServicer_to_server, worker, "twostroke.v1.Worker")
    server.add(control_pb2_grpc.add_DecodeServicer_to_server, worker, "twostroke.v1.Decode")
    port = server.bind(host, 0)
    await server.start()
    yield worker, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    await server.stop(0)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Channels]:
    channels = Channels(PeerConfig(), **options)
    yield channels
    await channels.close()


async def ask(channels: Channels, address: str) -> str:
    status = await control_pb2_grpc.WorkerStub(channels.get(address)).GetStatus(STATUS, timeout=10)
    return str(status.worker_id)


async def test_a_stream_goes_on_while_idle_channels_are_closed_around_it() -> None:
    async with served() as (streaming, address), served() as (_, second), served() as (_, third), opened(idle_s=0.0) as channels:
        call = control_pb2_grpc.DecodeStub(channels.get(address)).Generate(control_pb2.GenerateRequest())
        for _ in range(5):
            await ask(channels, second)
            await ask(channels, third)
            streaming.more.set()
            assert await call.read() is not grpc.aio.EOF
        assert channels.num_open <= 3
        call.cancel()
        await eventually(call.done)
        await ask(channels, second)
        await ask(channels, third)
        assert channels.num_open <= 2  # the stream has ended: its channel was closed as idle


async def test_a_stub_that_is_kept_works_after_its_channel_was_closed_as_idle() -> None:
    async with served() as (_, address), served() as (_, other), opened(idle_s=0.0) as channels:
        kept = control_pb2_grpc.WorkerStub(channels.get(address))
        for _ in range(3):
            assert (await kept.GetStatus(STATUS, timeout=10)).worker_id == "w"
            await ask(channels, other)
            assert channels.num_open == 1


async def test_channels_stay_open_between_calls() -> None:
    async with served() as (_, address), served() as (_, other), opened() as channels:
        for _ in range(3):
            await ask(channels, address)
            await ask(channels, other)
        assert channels.num_open == 2


async def test_a_call_that_failed_holds_its_channel_no_longer() -> None:
    async with served() as (_, address), opened(idle_s=0.0) as channels:
        with pytest.raises(grpc.RpcError):
            await ask(channels, "127.0.0.1:1")
        await ask(channels, address)
        assert channels.num_open == 1


async def test_after_the_close_no_call_begins() -> None:
    async with served() as (_, address), opened() as channels:
        await ask(channels, address)
        await channels.close()
        assert channels.num_open == 0
        with pytest.raises(Unavailable, match="stopping"):
            await ask(channels, address)


async def test_proxy_variables_do_not_catch_calls_to_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with served() as (_, address), opened() as channels:
        assert await ask(channels, address.replace("127.0.0.1", "localhost")) == "w"


async def test_ipv6_addresses_are_listened_on_and_called() -> None:
    async with served(host="::1") as (_, address), opened() as channels:
        assert await ask(channels, address) == "w"
