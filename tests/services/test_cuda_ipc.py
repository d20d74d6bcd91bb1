"""CUDA IPC with a fake device: copies end later than they begin, and a dead process's copies later than its socket. Nothing is
announced, granted or given back before they have ended. (That the right bytes arrive is in test_transports and test_split_pools;
on a real GPU, in tests/gpu.)"""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from shared.base.errors import ConfigError, StaleTransfer, TwostrokeError, Unavailable
from shared.base.worker_info import Role
from shared.engine.memory.kv_pool import KvPool
from shared.rpc import kv_pb2
from shared.transfer.handoff import metrics, setup
from shared.transfer.handoff.links import Links
from shared.transfer.handoff.sender import Sender
from shared.transfer.handoff.setup import make_acceptors, make_links
from shared.transfer.transports.grpc import GrpcConnector
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import LinkLost, Peer, Route
from shared.transfer.transports.mapped.link import MappedWriter
from shared.transfer.transports.mapped.receiver import MappedAcceptor
from shared.transfer.transports.mapped.socket import GOODBYE, ProcessEnd, pack_writer_id, receive_greeting
from tests.support.eventually import eventually
from tests.support.fake_device import FakeDevice, fake_cuda_acceptor, fake_cuda_connector
from tests.support.fake_runner import GEOMETRY
from tests.support.pair import Pair, ask, config_of, empty_group, finish, pair, random_pool, runner_of, sender_process

BOOT = "0123456789abcdef"


def devices() -> tuple[FakeDevice, FakeDevice, PoolGroup]:
    """The sender's, the receiver's, and the receiver's pools."""
    pools = PoolGroup.of(runner_of(Role.DECODE).pool)
    return FakeDevice(), FakeDevice(pools), pools


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Pair, Sender, FakeDevice, KvPool]]:
    """A transfer whose blocks are granted: the pair, its sender and the sender's device, and the receiver's pool."""
    ours, theirs, pools = devices()
    async with pair("cuda-ipc", pools=pools, devices=(ours, theirs)) as both:
        both.expect(100)
        sender = both.sender()
        await sender.open(7)
        yield both, sender, ours, pools.shards[0].pool


class TestCopiesUnderWay:
    async def test_a_chunk_is_announced_only_when_its_copies_have_ended(self) -> None:
        async with opened() as (both, sender, ours, _):
            ours.may_finish.clear()
            push = asyncio.create_task(sender.push(0, list(range(1, 8))))
            await eventually(lambda: bool(ours._begun))
            assert both.num_missing() == 7
            ours.may_finish.set()
            await push
            await eventually(lambda: both.num_missing() == 0)
            await sender.abort("test")
            await both.is_baseline()

    async def test_blocks_of_an_ended_attempt_go_back_only_when_its_copies_have_ended(self) -> None:
        async with opened() as (both, sender, ours, pool):
            blocks, writer = both.reserved_blocks(), sender._writer
            assert isinstance(writer, MappedWriter)
            ours.may_finish.clear()
            push = asyncio.create_task(sender.push(0, list(range(1, 8))))
            await eventually(lambda: bool(ours._begun))
            both.expire()
            await eventually(lambda: writer.is_closed)  # the order to stop has arrived; its answer waits for the copies
            assert metrics.quarantined_blocks._value.get() == 7
            assert both.num_reserved() == 1
            assert not pool.kv[blocks].any()
            ours.may_finish.set()
            await both.is_baseline()
            with pytest.raises(TwostrokeError):
                await push
            pool.kv[blocks] = 2.0
            with pytest.raises(StaleTransfer):
                await sender.push(0, [1])
            assert bool((pool.kv[blocks] == 2.0).all())
            await sender.abort("test")

    async def test_blocks_are_granted_only_when_the_receivers_own_work_has_ended(self) -> None:
        ours, theirs, pools = devices()
        async with pair("cuda-ipc", pools=pools, devices=(ours, theirs)) as both:
            both.expect(100)
            theirs.may_settle.clear()
            opening = asyncio.create_task(both.sender().open(7))
            await eventually(lambda: both.num_reserved() == 1)
            assert not opening.done()
            theirs.may_settle.set()
            assert await opening == 0
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    async def test_an_attempt_that_ends_while_it_waits_for_its_grant_is_stale(self) -> None:
        ours, theirs, pools = devices()
        async with pair("cuda-ipc", pools=pools, devices=(ours, theirs)) as both:
            both.expect(100)
            theirs.may_settle.clear()
            opening = asyncio.create_task(both.sender().open(7))
            await eventually(lambda: both.num_reserved() == 1)
            both.receiver.forget(b"t" * 16)
            theirs.may_settle.set()
            with pytest.raises(StaleTransfer):
                await opening
            await both.is_baseline()


class TestEndOfAPeer:
    async def test_receivers_end_unmaps_its_pools_at_the_sender(self) -> None:
        async with opened() as (both, sender, ours, _):
            assert ours.num_mapped == 1
            await both.receiver.acceptors.close()
            await eventually(lambda: ours.num_mapped == 0)
            with pytest.raises(Unavailable):
                await sender.push(0, [1])
            await sender.abort("test")
            both.receiver.forget(b"t" * 16)

    async def test_pools_stay_mapped_while_copies_to_them_are_under_way(self) -> None:
        async with opened() as (both, sender, ours, _):
            ours.may_finish.clear()
            push = asyncio.create_task(sender.push(0, [1, 2]))
            await eventually(lambda: bool(ours._begun))
            await both.receiver.acceptors.close()
            assert ours.num_mapped == 1
            ours.may_finish.set()
            await eventually(lambda: ours.num_mapped == 0)
            await asyncio.gather(push, return_exceptions=True)
            await sender.abort("test")
            both.receiver.forget(b"t" * 16)

    async def test_killed_sender_frees_its_blocks(self) -> None:
        async with pair("cuda-ipc", lease_s=60.0) as both, sender_process(both, "cuda-ipc") as process:
            both.expect(100)
            assert await ask(process, f"open {(b't' * 16).hex()} 7") == "cached 0"
            assert await ask(process, "push 0 4") == "pushed by cuda-ipc"
            await ask(process, "storm")
            process.kill()
            await both.is_baseline()

    @pytest.mark.parametrize("farewell", ["goodbye", "silent"])
    async def test_a_socket_that_closes_without_goodbye_proves_nothing_before_its_process_has_ended(
        self, farewell: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waits_for_the_process = asyncio.Event()
        wait = ProcessEnd.wait

        async def spy(end: ProcessEnd) -> None:
            waits_for_the_process.set()
            await wait(end)

        monkeypatch.setattr(ProcessEnd, "wait", spy)
        async with listening_acceptor() as acceptor, stranger(acceptor) as (process, link_id):
            fence = acceptor.landing(Route("cuda-ipc", link_id, 1), lambda: None).fence()
            assert fence is not None
            assert process.stdin is not None
            process.stdin.write(f"{farewell}\n".encode())
            if farewell == "silent":
                await waits_for_the_process.wait()
                assert not fence.done()
                process.kill()
            async with asyncio.timeout(5):
                await fence


@asynccontextmanager
async def listening_acceptor() -> AsyncIterator[MappedAcceptor]:
    _, _, pools = devices()
    acceptor = fake_cuda_acceptor(pools, BOOT)
    yield acceptor
    await acceptor.close()


STRANGER = f"""
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
greeting = connection.recv(4096)
print(greeting.hex(), flush=True)
if sys.stdin.readline().strip() == "goodbye":
    connection.send({pack_writer_id(GOODBYE)!r})
connection.close()
sys.stdin.readline()
"""


@asynccontextmanager
async def stranger(acceptor: MappedAcceptor) -> AsyncIterator[tuple[asyncio.subprocess.Process, bytes]]:
    """A process that connects as a sender does, and closes its socket when it is told to without ending itself."""
    path = acceptor.offer().socket_path
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, path, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    greeting = kv_pb2.PoolGreeting.FromString(bytes.fromhex((await process.stdout.readline()).decode()))
    assert (greeting.boot_id, len(greeting.pools)) == (BOOT, 1)
    try:
        yield process, greeting.link_id
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class TestChoice:
    async def test_memory_that_cannot_be_mapped_gives_way_to_the_next_transport(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs, pools = devices()

        def refuse(memory: kv_pb2.CudaMemory, size_bytes: int) -> torch.Tensor:
            raise OSError(f"its GPU {memory.device_uuid} is not visible to this process")

        monkeypatch.setattr(ours, "open", refuse)
        connector = fake_cuda_connector(GEOMETRY, ours)
        acceptor = fake_cuda_acceptor(pools, BOOT, theirs)
        with pytest.raises(LinkLost, match="GPU fake is not visible"):
            await connector.connect(Peer(None, BOOT), acceptor.offer())
        await acceptor.close()
        async with pair("grpc") as both:
            both.links = Links([connector, GrpcConnector()])
            both.expect(20)
            sender = both.sender()
            await sender.open(2)
            assert sender.transport == "grpc"
            await finish(sender, 0, [1, 2])
            both.receiver.forget(b"t" * 16)

    @pytest.mark.parametrize("heads", [3, 5])
    async def test_pools_of_another_model_are_not_kept_mapped(self, heads: int) -> None:
        pools = empty_group(replace(GEOMETRY, num_kv_heads=4), (2, 2))
        device = FakeDevice()
        acceptor = fake_cuda_acceptor(pools, BOOT)
        connector = fake_cuda_connector(replace(GEOMETRY, num_kv_heads=heads), device)
        with pytest.raises(LinkLost, match="does not hold every head once"):
            await connector.connect(Peer(None, BOOT), acceptor.offer())
        assert device.num_mapped == 0
        await acceptor.close()

    def test_forced_on_a_worker_without_a_gpu_it_ends_the_worker_with_one_line(self) -> None:
        with pytest.raises(ConfigError, match="--transport is cuda-ipc, but this worker can only do shm, gloo, grpc"):
            make_links(config_of("cuda-ipc"), random_pool(GEOMETRY, 1), lambda: "")
        with pytest.raises(ConfigError, match="--transport is cuda-ipc, but this worker can only do gloo, grpc"):
            make_acceptors(config_of("cuda-ipc"), PoolGroup.of(random_pool(GEOMETRY, 1)), BOOT, lambda: "")

    async def test_on_a_gpu_it_is_the_first_choice_and_left_out_where_memory_cannot_be_exported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        private = PoolGroup.of(random_pool(GEOMETRY, 1))
        monkeypatch.setattr(setup, "_has_cuda_ipc", lambda device: True)
        monkeypatch.setattr(setup, "CudaDevice", lambda: exporter)
        exporter = FakeDevice()
        assert make_links(config_of("auto"), private.shards[0].pool, lambda: "").transports == ("cuda-ipc", "shm", "gloo", "grpc")
        monkeypatch.setattr(exporter, "export", lambda blocks: kv_pb2.CudaMemory())
        acceptors = make_acceptors(config_of("auto"), private, BOOT, lambda: "")
        assert acceptors.transports == ("cuda-ipc", "gloo", "grpc")
        await acceptors.close()

        def refuse(blocks: torch.Tensor) -> kv_pb2.CudaMemory:
            raise OSError("cuIpcGetMemHandle: invalid argument")

        monkeypatch.setattr(exporter, "export", refuse)
        assert make_acceptors(config_of("auto"), private, BOOT, lambda: "").transports == ("gloo", "grpc")
        with pytest.raises(ConfigError, match="--transport is cuda-ipc"):
            make_acceptors(config_of("cuda-ipc"), private, BOOT, lambda: "")


def test_a_greeting_that_is_none_is_refused() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for message in (b"2stroke1" + bytes(40), b"\xff", kv_pb2.PoolGreeting(boot_id=BOOT).SerializeToString(), bytes(20_000)):
            theirs.send(message)
            with pytest.raises(OSError, match="does not hand out a pool"):
                receive_greeting(ours)
