"""A worker process of any role, from its options to its last stream.

    load the model ─> start the engine ─> serve gRPC ─> register ─> ready
    SIGTERM ─> draining (registered as such, no new requests) ─> streams end, or the time is up ─> deregister ─> stop

What a role adds is a `Front`: the services it puts in front of the engine, and what they need.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared.base.address import Address
from shared.base.request import Request
from shared.base.worker_info import BootId, Role, WorkerId, WorkerInfo
from shared.engine.compute.runner import ModelRunner
from shared.engine.engine import Engine
from shared.engine.load import load_runner
from shared.engine.memory import sizing
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.threads import compute_on_one_core, in_own_thread
from shared.index.keys import Keys
from shared.index.registration import Registration
from shared.options.worker import WorkerConfig
from shared.process.malloc import keep_large_buffers
from shared.process.own_address import own_address
from shared.process.readiness import notify_progress, notify_ready
from shared.process.telemetry import configure_logging, serve_metrics
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.channels import Channels
from shared.wire.serving import Server
from shared.worker.streams import Streams

log = logging.getLogger(__name__)

# How long the event loop may keep the interpreter from the engine's thread, which asks for it after every kernel. Python's default
# is ten times as long: longer than a layer takes.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service: the generated registration function, the servicer, and its full name."""

    register: Callable[[Any, Any], None]
    servicer: object
    name: str


async def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Front:
    """What a role puts in front of the engine."""

    services: Sequence[Service]
    transports: tuple[str, ...] = ()  # by which this worker sends or takes blocks
    close: Callable[[], Awaitable[None]] = _nothing  # gives up what connects it to other workers


class Worker:
    """Who this process is, and the parts its services share. `address` is where others reach it."""

    def __init__(self, config: WorkerConfig, role: Role, runner: ModelRunner, address: Address) -> None:
        self.config = config
        self.role = role
        self.boot_id = BootId(secrets.token_hex(8))
        self.pool = runner.pool
        self.geometry = runner.pool.geometry
        self.is_draining = False
        self.channels = Channels(config)
        self.streams = Streams(asyncio.get_running_loop())
        self.engine = Engine(runner, _scheduler(config, role, runner), self.streams.post)
        self._runner = runner
        self._address = address

    def host_name(self) -> str:
        """The name that others reach this machine by."""
        return self._address.host

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._runner.vocab_size

    def drain(self) -> None:
        """From now on, services refuse new requests."""
        self.is_draining = True

    def check_tokens(self, request: Request) -> None:
        """Raises InvalidRequest for ids outside the vocabulary. Every request that comes by the wire passes here first."""
        request.check_vocabulary(self.vocab_size)

    def info(self, transports: tuple[str, ...] = ()) -> WorkerInfo:
        return WorkerInfo(
            worker_id=WorkerId(self.config.worker_id or f"{self.role.value}@{self._address}"),
            boot_id=self.boot_id,
            role=self.role,
            address=str(self._address),
            model=self.config.model_name,
            digest=self.geometry.digest,
            block_size=self.geometry.block_size,
            num_blocks=self.pool.num_blocks,
            max_model_len=self._runner.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            transports=transports,
            draining=self.is_draining,
            load=self.engine.load(),
            source=self.config.model,
            revision=self.config.revision,
        )


def _own_address(config: WorkerConfig, port: int) -> Address:
    return own_address(config.host, port, config.advertise, config.redis_url)


def _scheduler(config: WorkerConfig, role: Role, runner: ModelRunner) -> Scheduler:
    blocks = BlockManager(runner.pool.num_blocks, runner.pool.geometry.block_size, config.enable_prefix_caching)
    return Scheduler(
        blocks,
        digest=runner.pool.geometry.digest,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=sizing.max_step_tokens(config, role, runner.pool.device),
        max_model_len=runner.max_model_len,
    )


class _StatusService(control_pb2_grpc.WorkerServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def GetStatus(self, request: control_pb2.GetStatusRequest, context: Any) -> control_pb2.WorkerStatus:
        info = self._worker.info()
        num_reserved, num_held = self._worker.engine.num_reserved_and_held()
        return control_pb2.WorkerStatus(
            worker_id=info.worker_id,
            boot_id=info.boot_id,
            role=info.role.value,
            model=info.model,
            digest=info.digest,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            num_free_blocks=info.load.num_free_blocks,
            num_running=info.load.num_running,
            num_waiting=info.load.num_waiting,
            num_reservations=num_reserved,
            num_held=num_held,
            draining=info.draining,
            num_steps=info.load.num_steps,
        )


def run_worker(config: WorkerConfig, role: Role, make_front: Callable[[Worker], Front]) -> None:
    """Runs until SIGTERM or SIGINT. Raises ConfigError for what an operator can mend."""
    configure_logging(config.log_level, config.worker_id or role.value)
    _own_address(config, config.port)  # there must be one: better known before the model is loaded
    keep_large_buffers()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    compute_on_one_core()
    notify_progress(f"loading {config.model_name}")
    runner = in_own_thread(lambda: load_runner(config, role))
    asyncio.run(_serve(config, role, runner, make_front))


async def _serve(config: WorkerConfig, role: Role, runner: ModelRunner, make_front: Callable[[Worker], Front]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = Server(config)
    port = server.bind(config.host, config.port)
    worker = Worker(config, role, runner, _own_address(config, port))
    front = make_front(worker)
    status = Service(control_pb2_grpc.add_WorkerServicer_to_server, _StatusService(worker), "twostroke.v1.Worker")
    for service in (*front.services, status):
        server.add(service.register, service.servicer, service.name)
    await server.start()
    if config.metrics_port is not None:
        serve_metrics(config.host, config.metrics_port)
    worker.engine.start()
    registration = Registration(config.redis_url, partial(worker.info, front.transports), worker.engine, Keys(config.namespace))
    await registration.start()
    await server.set_serving(True)
    log.info(
        "serving %s on port %d: %d blocks of %d tokens", config.model_name, port, worker.pool.num_blocks, worker.geometry.block_size
    )
    notify_ready()

    await stop.wait()
    worker.drain()
    await server.set_serving(False)
    await registration.publish()
    try:
        async with asyncio.timeout(config.drain_timeout_s):
            await worker.streams.wait_idle()
    except TimeoutError:
        log.warning("drain time is up; the router continues the remaining requests elsewhere")
    await registration.stop()
    await front.close()
    await worker.channels.close()
    await server.stop(grace_s=0.5)
    worker.engine.stop()
