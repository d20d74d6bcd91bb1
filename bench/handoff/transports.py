"""How fast KV blocks go from one process to another on this machine, by each transport, beside what the machine can do.

    python -m bench.handoff.transports [--mib 64] [--repeats 7] [--grpc-chunks 256KiB,1MiB,4MiB] [--device cpu] [--json FILE]

One process sends, another receives, both with the sender, receiver and pools of the product. A transfer is timed from its first
push to the acknowledged commit. Beside them, in the same run: a plain copy of the same blocks within one process, and bytes over a
raw loopback TCP socket to another process. The ways take turns, one transfer each, so that a busy moment of the machine meets all
of them. Each speed is that of the fastest repetition, because whatever else runs only slows down; even so, only ratios of one run
can be compared with those of another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from bench.load.report import write_json
from shared.base.request import Request, SamplingParams, Token
from shared.base.worker_info import KvGeometry
from shared.engine.engine import Engine
from shared.engine.memory.kv_pool import KvPool
from shared.engine.memory.pool_memory import SharedStorage, zeroed_storage
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.plan import Pending, Plan
from shared.engine.schedule.scheduler import Scheduler
from shared.kernels.reference import ReferenceKernels
from shared.options.config import option, parse_config, size_bytes
from shared.options.peers import PeerConfig
from shared.options.worker import WorkerConfig
from shared.process.malloc import keep_large_buffers
from shared.rpc import control_pb2, kv_pb2_grpc
from shared.transfer.handoff.acceptors import Acceptors
from shared.transfer.handoff.receiver import Receiver
from shared.transfer.handoff.sender import Sender
from shared.transfer.handoff.service import KvTransferService
from shared.transfer.handoff.setup import make_acceptors, make_links
from shared.transfer.transports.grpc import MAX_CHUNK_BYTES, GrpcAcceptor
from shared.transfer.transports.heads import HeadShard, PoolGroup
from shared.transfer.transports.interface import GRPC
from shared.wire.channels import Channels
from shared.wire.serving import Server

TRANSPORTS = {"cpu": ("shm", "gloo"), "cuda": ("cuda-ipc",)}  # and gRPC, by size of its chunks; NCCL wants a GPU for each process
COPY, SOCKET = "plain copy", "loopback socket"
NUM_WARM_UPS = 2
BOOT_ID = "0123456789abcdef"
HOST = "127.0.0.1"
# A block of an 8-billion-parameter Llama in bfloat16: 2 MiB.
GEOMETRY = KvGeometry("bench", "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, kv_dtype="bfloat16")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(size_bytes(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class TransportsConfig:
    """Measures how fast KV blocks move between two processes of this machine."""

    mib: int = option(64, "KV of one transfer, in MiB")
    repeats: int = option(7, "transfers by each transport, after two to warm up")
    grpc_chunks: tuple[int, ...] = option((MAX_CHUNK_BYTES,), "largest chunks for gRPC to try, such as 256KiB,4MiB", parse=_sizes)
    device: str = option("cpu", "where both processes' pools are", choices=("cpu", "cuda"))
    json: str = option("", "also write the result to this file")

    @property
    def num_blocks(self) -> int:
        return max(1, (self.mib << 20) // GEOMETRY.block_bytes)

    @property
    def num_transfers(self) -> int:
        return self.repeats + NUM_WARM_UPS


@dataclass(frozen=True, slots=True)
class Speed:
    way: str
    gb_per_s: float
    of_copy: float  # share of the plain copy's speed
    of_socket: float


# The receiving process


class _NoModel:
    """Transfers end with their first token: nothing is ever computed."""

    is_asynchronous = False

    def launch(self, plan: Plan, on_layer: object = None) -> Pending:
        raise AssertionError("a request of one token has nothing to compute here")


async def receive(config: TransportsConfig, transport: str) -> None:
    """Expects the transfers 0, 1, …, says where, and serves until its input ends. A number is gRPC with chunks of that size."""
    pool_blocks = 2 * config.num_blocks + 1
    storage = SharedStorage() if config.device == "cpu" else zeroed_storage
    pools = PoolGroup.of(KvPool(GEOMETRY, pool_blocks, torch.device(config.device), ReferenceKernels(), storage))
    blocks = BlockManager(pool_blocks, GEOMETRY.block_size, enable_prefix_caching=False)
    num_tokens = config.num_blocks * GEOMETRY.block_size
    scheduler = Scheduler(
        blocks, digest=GEOMETRY.digest, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=num_tokens + GEOMETRY.block_size
    )
    engine = Engine(_NoModel(), scheduler, lambda events: None)
    if transport.isdecimal():
        acceptors = Acceptors([GrpcAcceptor(int(transport))])
    else:
        acceptors = make_acceptors(WorkerConfig(transport=transport), pools, BOOT_ID, lambda: HOST)
    receiver = Receiver(engine, pools, 1, BOOT_ID, 30.0, lambda outputs: None, acceptors)
    for number in range(config.num_transfers):
        request = Request(f"r{number}", (0,) * num_tokens, num_tokens, SamplingParams(max_tokens=1))
        receiver.expect(number.to_bytes(16, "little"), request)
    server = Server(PeerConfig())
    server.add(kv_pb2_grpc.add_KvTransferServicer_to_server, KvTransferService(receiver, 30.0), "twostroke.v1.KvTransfer")
    port = server.bind(HOST, 0)
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await acceptors.close()
    await server.stop(0)


def drain_socket() -> None:
    """The other end of the raw socket: reads so many bytes, answers one, until the connection ends."""
    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        buffer = bytearray(4 << 20)
        with connection:
            while size := connection.recv(8):
                remaining = int.from_bytes(size, "little")
                while remaining:
                    remaining -= connection.recv_into(buffer, min(remaining, len(buffer)))
                connection.sendall(b"!")


# The sending process


@asynccontextmanager
async def other_process(config: TransportsConfig, what: str) -> AsyncIterator[int]:
    """Runs `what` in a process of its own; gives the port that it is at."""
    command = [sys.executable, "-m", "bench.handoff.transports"]
    command += [f"--mib={config.mib}", f"--repeats={config.repeats}", f"--device={config.device}"]
    pipe = asyncio.subprocess.PIPE
    environ = os.environ | {_ROLE: what, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environ)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


def full_pool(num_blocks: int, device: str) -> KvPool:
    pool = KvPool(GEOMETRY, num_blocks, torch.device(device), ReferenceKernels())
    pool.blocks.random_(generator=torch.Generator(device).manual_seed(1))
    return pool


Transfer = Callable[[], Awaitable[float]]  # all the blocks once; seconds


@dataclass(slots=True, eq=False)
class Way:
    name: str
    transfer: Transfer
    seconds: list[float] = field(default_factory=list)


@asynccontextmanager
async def by_transport(config: TransportsConfig, role: str, pool: KvPool) -> AsyncIterator[Transfer]:
    """`role` is the receiver's: a transport, or the size of gRPC's chunks."""
    channels = Channels(PeerConfig())
    links = make_links(WorkerConfig(transport=GRPC if role.isdecimal() else role), pool, lambda: HOST)
    numbers = itertools.count()
    async with other_process(config, role) as port:

        async def transfer() -> float:
            destination = control_pb2.Destination(transfer_id=next(numbers).to_bytes(16, "little"), boot_id=BOOT_ID)
            sender = Sender(links, channels.get(f"{HOST}:{port}"), destination, GEOMETRY, [HeadShard(pool)], 30.0)
            await sender.open(config.num_blocks)
            begin = time.perf_counter()
            await sender.push(0, range(1, config.num_blocks + 1))
            await sender.commit([Token(0, 1)], 0)
            return time.perf_counter() - begin

        yield transfer
        await links.close()
        await channels.close()


def by_copy(config: TransportsConfig, pool: KvPool) -> Transfer:
    """To memory of this process that is there already."""
    source = pool.blocks
    target = torch.ones_like(source)

    async def transfer() -> float:
        begin = time.perf_counter()
        for block in range(1, config.num_blocks + 1):
            target[block] = source[block]
        if config.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return transfer


@asynccontextmanager
async def by_socket(config: TransportsConfig, pool: KvPool) -> AsyncIterator[Transfer]:
    """From main memory, wherever the pool is."""
    size_bytes = config.num_blocks * GEOMETRY.block_bytes
    data = pool.blocks.flatten()[:size_bytes].cpu().numpy().data
    async with other_process(config, "socket") as port:
        with socket.create_connection((HOST, port)) as connection:

            async def transfer() -> float:
                begin = time.perf_counter()
                connection.sendall(size_bytes.to_bytes(8, "little"))
                connection.sendall(data)
                connection.recv(1)
                return time.perf_counter() - begin

            yield transfer


async def measure(config: TransportsConfig) -> list[Speed]:
    torch.set_num_threads(1)
    pool = full_pool(config.num_blocks + 1, config.device)
    async with AsyncExitStack() as stack:
        ways = [Way(COPY, by_copy(config, pool)), Way(SOCKET, await stack.enter_async_context(by_socket(config, pool)))]
        for role in (*TRANSPORTS[config.device], *map(str, config.grpc_chunks)):
            name = f"grpc {int(role) >> 10} KiB" if role.isdecimal() else role
            ways.append(Way(name, await stack.enter_async_context(by_transport(config, role, pool))))
        for _ in range(config.num_transfers):
            for way in ways:
                way.seconds.append(await way.transfer())
    size_bytes = config.num_blocks * GEOMETRY.block_bytes
    speeds = {way.name: size_bytes / min(way.seconds[NUM_WARM_UPS:]) / 1e9 for way in ways}
    return [Speed(way, speed, speed / speeds[COPY], speed / speeds[SOCKET]) for way, speed in speeds.items()]


def table(speeds: list[Speed]) -> str:
    rows = [f"{'':16}{'GB/s':>8}{'of copy':>10}{'of socket':>11}"]
    rows += [f"{s.way:16}{s.gb_per_s:8.2f}{s.of_copy:10.0%}{s.of_socket:11.0%}" for s in speeds]
    return "\n".join(rows)


_ROLE = "TWOSTROKE_BENCH_ROLE"  # set for the other process: a transport or a size of gRPC's chunks to receive by, or "socket"


def main() -> None:
    config = parse_config(TransportsConfig, sys.argv[1:], "python -m bench.handoff.transports")
    keep_large_buffers()  # as every worker does
    role = os.environ.get(_ROLE)
    if role == "socket":
        drain_socket()
    elif role is not None:
        asyncio.run(receive(config, role))
    else:
        speeds = asyncio.run(measure(config))
        print(table(speeds))
        if config.json:
            write_json(Path(config.json), {"mib": config.mib, "speeds": [asdict(s) for s in speeds]})


if __name__ == "__main__":
    main()
