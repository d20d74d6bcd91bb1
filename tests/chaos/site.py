"""What chaos happens to: Valkey, prefill and decode workers and a router, each a process, each worker behind a relay.

    router ──relay──> prefill-0 ──┐        prefill-0   chunks go as two workers of one host do it best (shared memory)
       │      relay──> prefill-1 ─┤        prefill-1   chunks go over gRPC, and wrong on demand
       └───── relay ──────────────┴──> decode-0, decode-1

As root, the last decode worker is at the end of a wire that loses packets, and the workers' logs are on a disk that can be full.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import httpx

from services.local.valkey import ValkeyAddress
from shared.base.worker_info import Role
from shared.rpc import control_pb2, control_pb2_grpc
from tests.chaos.blockable import BLOCK_FILE_VARIABLE
from tests.chaos.chunk_fault import CHUNKS_FILE_VARIABLE, ChunkFault
from tests.chaos.disk import SmallDisk
from tests.chaos.relay import Relay
from tests.chaos.wire import Wire
from tests.support.parts import READY_TIMEOUT_S, Part, free_ports, service_command
from tests.support.tiny_model import MAX_MODEL_LEN, save_tiny_model
from tests.support.valkey import TestValkey

MODEL_NAME = "tiny"
CLUSTER_SECRET = "the secret of this chaos"
TRANSFER_TIMEOUT_S = 2.0
WORKER_WAIT_S = 60.0
# Few enough that the load fills the pools: requests wait for room, and running ones are preempted.
NUM_BLOCKS = {Role.PREFILL: 96, Role.DECODE: 64}
_STATUS_TIMEOUT_S = 5.0


@dataclass(eq=False)
class SiteWorker:
    """`lock` is held by the fault that has this worker now; only one at a time may start, stop or freeze it."""

    role: Role
    part: Part
    relay: Relay
    target: tuple[str, int]  # past the relay
    metrics_url: str
    wire: Wire | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.part.name

    async def status(self) -> control_pb2.WorkerStatus:
        host, port = self.target
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            stub = control_pb2_grpc.WorkerStub(channel)
            request, metadata = control_pb2.GetStatusRequest(), (("twostroke-cluster-secret", CLUSTER_SECRET),)
            return await stub.GetStatus(request, timeout=_STATUS_TIMEOUT_S, wait_for_ready=True, metadata=metadata)


class Site:
    def __init__(self, folder: Path, rng: random.Random, num_prefill: int, num_decode: int, is_root: bool) -> None:
        """`is_root`: a wire that loses packets, and a disk for the workers' logs that can be filled."""
        self.folder = folder
        self.disk = SmallDisk(folder / "logs") if is_root else None
        (folder / "logs").mkdir()
        self.valkey = TestValkey(ValkeyAddress(unix_socket=folder / "valkey"))
        self.valkey_lock = asyncio.Lock()
        self.router_lock = asyncio.Lock()
        self.router_is_up = asyncio.Event()
        self.num_router_kills = 0
        self.on_death: Callable[[Part], Awaitable[None]] | None = None  # called before a process is ended
        self._chunks_file = folder / "chunks"
        self._chunks_file.write_text("")
        self._block_file = folder / "block"
        (folder / "tmp").mkdir()
        model = save_tiny_model(folder / MODEL_NAME)
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TWOSTROKE_")},
            "TWOSTROKE_MODEL": str(model),
            "TWOSTROKE_REDIS_URL": self.valkey.url,
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TWOSTROKE_CLUSTER_SECRET": CLUSTER_SECRET,
            CHUNKS_FILE_VARIABLE: str(self._chunks_file),
            BLOCK_FILE_VARIABLE: str(self._block_file),
        }
        self.workers = [self._worker(Role.PREFILL, number) for number in range(num_prefill)]
        for number in range(num_decode):
            is_last = number == num_decode - 1
            self.workers.append(self._worker(Role.DECODE, number, Wire(1, rng) if is_root and is_last else None))
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.router = self._router(port)

    def _worker(self, role: Role, number: int, wire: Wire | None = None) -> SiteWorker:
        name = f"{role.value}-{number}"
        port, relay_port, metrics_port = free_ports(3)
        host = wire.far_host if wire else "127.0.0.1"
        options = {
            "WORKER_ID": name,
            "HOST": host,
            "PORT": port,
            "ADVERTISE": f"127.0.0.1:{relay_port}",
            "METRICS_PORT": metrics_port,
            "KERNELS": "reference",
            "DEVICE": "cpu",
            "NUM_THREADS": 1,
            "NUM_BLOCKS": NUM_BLOCKS[role],
            "MAX_MODEL_LEN": MAX_MODEL_LEN,
            "MAX_NUM_SEQS": 16,
            "MAX_NUM_BATCHED_TOKENS": 64,  # so that prompts take several chunks
            "TRANSFER_TIMEOUT_S": TRANSFER_TIMEOUT_S,
            "DRAIN_TIMEOUT_S": 5.0,
        }
        environ = self._environ | {f"TWOSTROKE_{option}": str(value) for option, value in options.items()}
        is_faulty = role is Role.PREFILL and number == 1
        module = ("tests.chaos.faulty_prefill",) if is_faulty else ("tests.chaos.blockable", role.value)
        command: tuple[str, ...] = (sys.executable, "-m", *module)
        if wire is not None:
            command = (*wire.enter_command, *command)
        part = Part(name, command, environ, self.folder / "logs" / f"{name}.log")
        target = (host, port)
        return SiteWorker(role, part, Relay(relay_port, target), target, f"http://{host}:{metrics_port}/metrics", wire)

    def _router(self, port: int) -> Part:
        environ = self._environ | {
            "TWOSTROKE_PORT": str(port),
            "TWOSTROKE_HANDOFF": "always",
            "TWOSTROKE_WORKER_WAIT_S": str(WORKER_WAIT_S),
            "TWOSTROKE_REQUEST_TIMEOUT_S": "100",
        }
        return Part("router", service_command("router"), environ, self.folder / "router.log")

    @property
    def parts(self) -> list[Part]:
        return [self.router, *(worker.part for worker in self.workers)]

    @property
    def metrics_urls(self) -> dict[str, str]:
        """By name of the process."""
        return {"router": f"{self.url}/metrics"} | {worker.name: worker.metrics_url for worker in self.workers}

    def of_role(self, role: Role) -> list[SiteWorker]:
        return [worker for worker in self.workers if worker.role is role]

    def break_chunks(self, fault: ChunkFault | None) -> None:
        self._chunks_file.write_text(fault.value if fault is not None else "")

    def block_loop(self, worker: SiteWorker, duration_s: float) -> None:
        """The worker's event loop stands still for so long."""
        self._block_file.write_text(str(duration_s))
        worker.part.signal(signal.SIGUSR1)

    async def start(self) -> None:
        if self.disk is not None:
            self.disk.mount()
        await self.valkey.start()
        for worker in self.workers:
            await worker.relay.start()
            if worker.wire is not None:
                worker.wire.connect()
        await asyncio.gather(*(part.start() for part in self.parts))
        await self.wait_ready()

    async def stop(self) -> None:
        await asyncio.gather(*(part.stop() for part in self.parts))
        self.valkey.thaw()
        await self.valkey.stop()
        for worker in self.workers:
            await worker.relay.close()
            if worker.wire is not None:
                worker.wire.disconnect()
        if self.disk is not None:
            self.disk.unmount()

    async def wait_ready(self) -> None:
        """The router has proven that a request would succeed."""
        async with asyncio.timeout(READY_TIMEOUT_S), httpx.AsyncClient() as client:
            while True:
                try:
                    if (await client.get(f"{self.url}/ready", timeout=2.0)).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)
        self.router_is_up.set()

    async def end(self, part: Part, end: Callable[[], Awaitable[object]]) -> None:
        """Ends a process by `end`, and has what it counted read before."""
        if self.on_death is not None:
            await self.on_death(part)
        await end()


@asynccontextmanager
async def site(folder: Path, rng: random.Random, is_root: bool = False, num_each: int = 2) -> AsyncIterator[Site]:
    made = Site(folder, rng, num_each, num_each, is_root)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
