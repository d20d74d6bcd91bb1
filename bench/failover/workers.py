"""The single workers of a stack that this process has started: who is alive, who is busy, and the end of one by SIGKILL.

registry ─> alive, under which boot id      GetStatus ─> how busy      process tree ─> pid, by TWOSTROKE_WORKER_ID
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import psutil

from shared.base.errors import ConfigError
from shared.base.worker_info import BootId, Role, WorkerId, WorkerInfo
from shared.index.keys import Keys
from shared.index.watcher import FleetWatcher
from shared.options.peers import DEFAULT_NAMESPACE, PeerConfig
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.channels import Channels

_STATUS_TIMEOUT_S = 5.0
_BACK_TIMEOUT_S = 90.0  # a worker loads its model first, on a core that streams use


class WorkerLost(Exception):
    """A worker is not (back) where it should be."""


class Workers:
    def __init__(self, redis_url: str, namespace: str, cluster_secret: str, num_workers: int) -> None:
        self._num_workers = num_workers
        self._changed = asyncio.Event()
        self._watcher = FleetWatcher(redis_url, Keys(namespace), lambda worker_id: self._changed.set())
        self._channels = Channels(PeerConfig(cluster_secret=cluster_secret))
        self._killed: set[BootId] = set()  # boot ids

    async def start(self) -> None:
        await self._watcher.start()

    async def close(self) -> None:
        await self._watcher.stop()
        await self._channels.close()

    async def all_alive(self) -> None:
        """Returns when every worker is registered by a process that was not killed. Raises WorkerLost."""
        try:
            async with asyncio.timeout(_BACK_TIMEOUT_S):
                while len(self._alive()) < self._num_workers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise WorkerLost(f"{len(self._alive())} of {self._num_workers} workers are there after {_BACK_TIMEOUT_S:g} s") from None

    async def num_running(self, role: Role) -> dict[WorkerId, int]:
        """By worker id, the sequences that each worker of this role computes now. Raises grpc.RpcError."""
        workers = [worker for worker in self._alive() if worker.role is role]
        statuses = await asyncio.gather(*(self._status(worker) for worker in workers))
        return {worker.worker_id: status.num_running for worker, status in zip(workers, statuses, strict=True)}

    def kill(self, worker_id: WorkerId) -> float:
        """time.perf_counter() at its end. Raises WorkerLost."""
        boot_id = next((worker.boot_id for worker in self._alive() if worker.worker_id == worker_id), None)
        pid = next((process.pid for process, environ in _processes() if environ.get("TWOSTROKE_WORKER_ID") == worker_id), None)
        if boot_id is None or pid is None:
            raise WorkerLost(f"{worker_id} is to be killed, and is not there")
        self._killed.add(boot_id)
        killed_at = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        return killed_at

    def _alive(self) -> list[WorkerInfo]:
        return [worker for worker in self._watcher.workers.values() if worker.boot_id not in self._killed]

    async def _status(self, worker: WorkerInfo) -> control_pb2.WorkerStatus:
        stub = control_pb2_grpc.WorkerStub(self._channels.get(worker.address))
        status: control_pb2.WorkerStatus = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
        return status


@asynccontextmanager
async def workers_of_stack(num_workers: int) -> AsyncIterator[Workers]:
    """Of the one stack that runs below this process. Raises ConfigError if there is none."""
    environ = next((environ for _, environ in _processes() if "TWOSTROKE_WORKER_ID" in environ), None)
    if environ is None:
        raise ConfigError("no worker runs below this process")
    workers = Workers(
        environ["TWOSTROKE_REDIS_URL"],
        environ.get("TWOSTROKE_NAMESPACE", DEFAULT_NAMESPACE),
        environ["TWOSTROKE_CLUSTER_SECRET"],
        num_workers,
    )
    await workers.start()
    try:
        yield workers
    finally:
        await workers.close()


def _processes() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """All below this one, parents before children, with their environments. Others on this machine may run stacks of their own."""
    for process in psutil.Process().children(recursive=True):
        try:
            yield process, process.environ()
        except psutil.Error:  # it has just ended
            continue
