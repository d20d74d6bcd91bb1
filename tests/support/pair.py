"""One real receiver behind a real gRPC server, and one sender, in this process or in one of its own."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from shared.base.request import Token
from shared.base.worker_info import KvGeometry, Role
from shared.engine.memory.kv_pool import KvPool
from shared.engine.memory.pool_memory import SharedStorage
from shared.kernels.reference import ReferenceKernels
from shared.options.peers import PeerConfig
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, kv_pb2_grpc
from shared.transfer.handoff import metrics
from shared.transfer.handoff.acceptors import Acceptors
from shared.transfer.handoff.links import Links
from shared.transfer.handoff.receiver import Receiver
from shared.transfer.handoff.sender import Sender
from shared.transfer.handoff.service import KvTransferService
from shared.transfer.handoff.setup import make_acceptors, make_links
from shared.transfer.transports.heads import HeadShard, PoolGroup
from shared.wire.channels import Channels
from shared.worker.worker import Front, Service
from tests.support.cluster import FakeWorker, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_device import FakeDevice, fake_cuda_acceptor, fake_cuda_connector
from tests.support.fake_runner import GEOMETRY, FakeRunner
from tests.support.fake_transport import FakeAcceptor, FakeConnector, FakeWire

PAIR_TRANSPORTS = ("grpc", "shm", "gloo", "cuda-ipc")  # the last one's device memory is a fake
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def config_of(transport: str, timeout_s: float = 2.0) -> WorkerConfig:
    return WorkerConfig(transport=transport, transfer_timeout_s=timeout_s, max_num_batched_tokens=64)


def runner_of(role: Role, num_blocks: int = 64, geometry: KvGeometry = GEOMETRY) -> FakeRunner:
    runner = FakeRunner(num_blocks, geometry)
    if role is Role.DECODE:
        runner.pool = KvPool(geometry, num_blocks, CPU, ReferenceKernels(), SharedStorage())
    return runner


def num_links_made() -> float:
    return sum(float(metrics.links.labels(name, "made")._value.get()) for name in PAIR_TRANSPORTS)


class Pair:
    """A real receiver behind a real server, and a sender's pool full of known bytes."""

    def __init__(self, worker: FakeWorker, receiver: Receiver, links: Links) -> None:
        self.worker = worker
        self.receiver = receiver
        self.links = links
        self.num_links_before = num_links_made()
        self.channels = Channels(PeerConfig())
        self.geometry = worker.worker.geometry
        self.pool = random_pool(self.geometry, 1)

    def expect(self, num_tokens: int, transfer_id: bytes = b"t" * 16) -> None:
        """One output token, so that what is committed has also finished."""
        self.receiver.expect(transfer_id, request(prompt_of(num_tokens, sum(transfer_id)), max_tokens=1))

    def num_missing(self) -> int:
        """Blocks of the one transfer that have not come."""
        (expected,) = self.receiver._expected.values()
        assert expected.reservation is not None
        return int(expected.reservation.missing.any(axis=(1, 2)).sum())

    def reserved_blocks(self, transfer_id: bytes = b"t" * 16) -> list[int]:
        reservation = self.receiver._expected[transfer_id].reservation
        assert reservation is not None
        return list(reservation.sequence.block_table)

    def expire(self, transfer_id: bytes = b"t" * 16) -> None:
        """The lease ends now, however fast this machine is."""
        expected = self.receiver._expected[transfer_id]
        assert expected.reservation is not None
        expected.reservation.lease.cancel()
        self.receiver._expire(expected)

    def sender(self, attempt: int = 0, transfer_id: bytes = b"t" * 16, shards: list[HeadShard] | None = None) -> Sender:
        address = self.worker.info().address
        destination = control_pb2.Destination(
            transfer_id=transfer_id, attempt=attempt, boot_id=self.worker.worker.boot_id, address=address
        )
        channel = self.channels.get(address)
        return Sender(self.links, channel, destination, self.geometry, shards or [HeadShard(self.pool)], 2.0)

    def num_reserved(self) -> int:
        return self.worker.worker.engine.num_reserved_and_held()[0]

    async def is_baseline(self) -> None:
        await eventually(lambda: self.num_reserved() == 0)
        self.worker.check_baseline()
        assert metrics.quarantined_blocks._value.get() == 0


async def finish(sender: Sender, first_block: int, block_ids: list[int], num_blocks_each: int = 64) -> None:
    """Pushes the rest of the prompt, so many blocks at a time, and commits."""
    for start in range(0, len(block_ids), num_blocks_each):
        await sender.push(first_block + start, block_ids[start : start + num_blocks_each])
    await sender.commit([Token(0, 7)], 0)


def random_pool(geometry: KvGeometry, seed: int, num_blocks: int = 64) -> KvPool:
    pool = KvPool(geometry, num_blocks, CPU, ReferenceKernels())
    pool.blocks.random_(generator=torch.Generator().manual_seed(seed))
    return pool


@asynccontextmanager
async def pair(
    transport: str,
    wire: FakeWire | None = None,
    lease_s: float = 5.0,
    geometry: KvGeometry = GEOMETRY,
    pools: PoolGroup | None = None,
    devices: tuple[FakeDevice, FakeDevice] | None = None,
) -> AsyncIterator[Pair]:
    """`wire`: of the fake transport, which is then used whatever `transport` says. `pools`: where blocks arrive, instead of in the
    worker's own pool. `devices`: the sender's and the receiver's, of cuda-ipc."""
    metrics.quarantined_blocks.set(0)  # a receiver that stops with blocks in quarantine never gives them back
    config = config_of("auto" if transport == "cuda-ipc" else transport)
    worker = FakeWorker(Role.DECODE, 64, config, runner_of(Role.DECODE, 64, geometry))
    made = worker.worker
    pools = pools or PoolGroup.of(made.pool)
    if transport == "cuda-ipc" and pools.shards[0].pool.device.type == "cpu":
        ours, theirs = devices or (FakeDevice(), FakeDevice(pools))
        acceptors = Acceptors([fake_cuda_acceptor(pools, made.boot_id, theirs)])
        links = Links([fake_cuda_connector(geometry, ours)])
    elif wire is None:
        acceptors = make_acceptors(made.config, pools, made.boot_id, lambda: "127.0.0.1")
        links = make_links(made.config, random_pool(geometry, 2), lambda: "127.0.0.1")
    else:
        acceptors, links = Acceptors([FakeAcceptor(wire, made.pool)]), Links([FakeConnector(wire)])
    receiver = Receiver(made.engine, pools, made.vocab_size, made.boot_id, lease_s, made.streams.deliver, acceptors)
    service = KvTransferService(receiver, 2.0)
    transfer = Service(kv_pb2_grpc.add_KvTransferServicer_to_server, service, "twostroke.v1.KvTransfer")
    await worker.start_with(Front([transfer]))
    both = Pair(worker, receiver, links)
    try:
        yield both
    finally:
        await links.close()
        await both.channels.close()
        await acceptors.close()
        await worker.stop()


def split_pool(pool: KvPool, split: Sequence[int]) -> tuple[list[HeadShard], torch.Tensor]:
    """Pools with some heads each, and what they are together."""
    shards, first = [], 0
    for count in split:
        part = random_pool(replace(pool.geometry, num_kv_heads=count), 0)
        part.blocks.copy_(pool.blocks[:, :, :, first : first + count])
        shards.append(HeadShard(part, first))
        first += count
    return shards, pool.blocks


def empty_group(geometry: KvGeometry, split: Sequence[int]) -> PoolGroup:
    """Pools in shared storage that have so many of the heads each."""
    firsts = [sum(split[:index]) for index in range(len(split))]
    pools = [KvPool(replace(geometry, num_kv_heads=count), 64, CPU, ReferenceKernels(), SharedStorage()) for count in split]
    return PoolGroup([HeadShard(pool, first) for pool, first in zip(pools, firsts, strict=True)])


def all_heads(pools: PoolGroup) -> torch.Tensor:
    """What the pools hold together."""
    return torch.cat([shard.pool.blocks for shard in pools.shards], dim=3)


@asynccontextmanager
async def sender_process(both: Pair, transport: str, device: str = "cpu") -> AsyncIterator[Process]:
    info = both.worker.info()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.sender_process",
        info.address,
        info.boot_id,
        transport,
        device,
        stdin=PIPE,
        stdout=PIPE,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def ask(process: Process, command: str) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{command}\n".encode())
    return await answer(process)


async def answer(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return (await process.stdout.readline()).decode().strip()
