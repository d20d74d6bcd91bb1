"""How fast KV blocks go from one process to another on this machine, by each transport, beside what the machine can do.

    python -m bench.transports [--mib 64] [--repeats 7] [--json FILE]

One process sends, another receives, both with the sender, receiver and pools of the product. A transfer is timed from its first
push to the acknowledged commit. Beside them, in the same run: a plain copy of the same blocks within one process, and bytes over a
raw loopback TCP socket to another process. Each speed is that of the fastest repetition, because whatever else runs on the machine
only slows down; even so, only ratios of one run can be compared with those of another.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.report import write_json
from shared.channels import Channels
from shared.config import option, parse_config
from shared.engine.blocks import BlockManager
from shared.engine.engine import Engine
from shared.engine.kv_pool import KvPool
from shared.engine.plan import Pending, Plan
from shared.engine.pool_memory import SharedStorage
from shared.engine.scheduler import Scheduler
from shared.grpc_serving import Server
from shared.kernels.reference import ReferenceKernels
from shared.request import Request, SamplingParams, Token
from shared.rpc import control_pb2, kv_pb2_grpc
from shared.transfer.receiver import Receiver
from shared.transfer.sender import HeadShard, Sender
from shared.transfer.service import KvTransferService
from shared.transfer.setup import make_hosts, make_links
from shared.worker_config import TlsConfig, WorkerConfig
from shared.worker_info import KvGeometry

TRANSPORTS = ("shm", "gloo", "grpc")
BOOT_ID = "0123456789abcdef"
HOST = "127.0.0.1"
# A block of an 8-billion-parameter Llama in bfloat16: 2 MiB.
GEOMETRY = KvGeometry("bench", "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, kv_dtype="bfloat16")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TransportsConfig:
    """Measures how fast KV blocks move between two processes of this machine."""

    mib: int = option(64, "KV of one transfer, in MiB")
    repeats: int = option(7, "transfers by each transport, after two to warm up")
    json: str = option("", "also write the result to this file")

    @property
    def num_blocks(self) -> int:
        return max(1, (self.mib << 20) // GEOMETRY.block_bytes)

    @property
    def num_transfers(self) -> int:
        return self.repeats + 2


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

    def launch(self, plan: Plan) -> Pending:
        raise AssertionError("a request of one token has nothing to compute here")


async def receive(config: TransportsConfig, transport: str) -> None:
    """Expects the transfers 0, 1, …, says where, and serves until its input ends."""
    pool_blocks = 2 * config.num_blocks + 1
    pool = KvPool(GEOMETRY, pool_blocks, CPU, ReferenceKernels(), SharedStorage())
    blocks = BlockManager(pool_blocks, GEOMETRY.block_size, enable_prefix_caching=False)
    num_tokens = config.num_blocks * GEOMETRY.block_size
    scheduler = Scheduler(
        blocks, digest=GEOMETRY.digest, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=num_tokens + GEOMETRY.block_size
    )
    engine = Engine(_NoModel(), scheduler, lambda events: None)
    hosts = make_hosts(WorkerConfig(transport=transport), pool, BOOT_ID, lambda: HOST)
    receiver = Receiver(engine, pool, GEOMETRY, BOOT_ID, 30.0, lambda outputs: None, hosts)
    for number in range(config.num_transfers):
        request = Request(f"r{number}", (0,) * num_tokens, num_tokens, SamplingParams(max_tokens=1))
        receiver.expect(number.to_bytes(16, "little"), request)
    server = Server(TlsConfig())
    server.add(kv_pb2_grpc.add_KvTransferServicer_to_server, KvTransferService(receiver, 30.0), "twostroke.v1.KvTransfer")
    print(await server.start(HOST, 0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await hosts.close()
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
    command = [sys.executable, "-m", "bench.transports", f"--mib={config.mib}", f"--repeats={config.repeats}"]
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


def full_pool(num_blocks: int) -> KvPool:
    pool = KvPool(GEOMETRY, num_blocks, CPU, ReferenceKernels())
    pool.kv.view(torch.int16).random_(generator=torch.Generator().manual_seed(1))
    return pool


async def time_transport(config: TransportsConfig, transport: str, pool: KvPool) -> list[float]:
    """Seconds of each transfer."""
    channels = Channels(TlsConfig())
    links = make_links(WorkerConfig(transport=transport), pool, lambda: HOST)
    times = []
    async with other_process(config, transport) as port:
        for number in range(config.num_transfers):
            destination = control_pb2.Destination(transfer_id=number.to_bytes(16, "little"), boot_id=BOOT_ID)
            channel = channels.get(f"{HOST}:{port}")
            sender = Sender(links, channel, destination, GEOMETRY, [HeadShard(pool)], 30.0)
            await sender.open(config.num_blocks)
            begin = time.perf_counter()
            await sender.push(0, range(1, config.num_blocks + 1))
            await sender.commit([Token(0, 1)], 0)
            times.append(time.perf_counter() - begin)
        await links.close()
        await channels.close()
    return times[2:]


def time_copy(config: TransportsConfig, pool: KvPool) -> list[float]:
    """Seconds of copying the same blocks to memory of this process that is there already."""
    source = pool.host_blocks
    target = np.ones_like(source)

    def copy() -> None:
        for block in range(1, config.num_blocks + 1):
            target[block] = source[block]

    return [_time(copy) for _ in range(config.num_transfers)][2:]


async def time_socket(config: TransportsConfig, pool: KvPool) -> list[float]:
    size_bytes = config.num_blocks * GEOMETRY.block_bytes
    data = pool.host_blocks.reshape(-1)[:size_bytes].data
    async with other_process(config, "socket") as port:
        with socket.create_connection((HOST, port)) as connection:

            def send() -> None:
                connection.sendall(size_bytes.to_bytes(8, "little"))
                connection.sendall(data)
                connection.recv(1)

            times = [_time(send) for _ in range(config.num_transfers)]
    return times[2:]


def _time(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


async def measure(config: TransportsConfig) -> list[Speed]:
    torch.set_num_threads(1)
    pool = full_pool(config.num_blocks + 1)
    copies = time_copy(config, pool)
    times = {"plain copy": copies, "loopback socket": await time_socket(config, pool)}
    for transport in TRANSPORTS:
        times[transport] = await time_transport(config, transport, pool)
        copies += time_copy(config, pool)  # again and again, so that a busy moment does not spoil the yardstick
    size_bytes = config.num_blocks * GEOMETRY.block_bytes
    speeds = {way: size_bytes / min(seconds) / 1e9 for way, seconds in times.items()}
    copy, raw = speeds["plain copy"], speeds["loopback socket"]
    return [Speed(way, speed, speed / copy, speed / raw) for way, speed in speeds.items()]


def table(speeds: list[Speed]) -> str:
    rows = [f"{'':16}{'GB/s':>8}{'of copy':>10}{'of socket':>11}"]
    rows += [f"{s.way:16}{s.gb_per_s:8.2f}{s.of_copy:10.0%}{s.of_socket:11.0%}" for s in speeds]
    return "\n".join(rows)


_ROLE = "TWOSTROKE_BENCH_ROLE"  # set for the other process: a transport to receive by, or "socket"


def main() -> None:
    config = parse_config(TransportsConfig, sys.argv[1:], "python -m bench.transports")
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
