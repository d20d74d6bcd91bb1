"""Workers with real gRPC servers, engines and block pools in one process and one event loop; only the model is a fake."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from services.decode.__main__ import decode_front
from services.prefill.__main__ import prefill_front
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.fleet import Fleet
from shared.base.address import Address
from shared.base.request import Output, Request, SamplingParams
from shared.base.worker_info import Role, WorkerInfo
from shared.options.peers import PeerConfig
from shared.options.worker import WorkerConfig
from shared.wire.channels import Channels
from shared.wire.serving import Server
from shared.worker.worker import Front, Worker
from tests.support.fake_runner import GEOMETRY, FakeAsyncRunner, FakeRunner

_ids = itertools.count()


class FakeWorker:
    """One worker of any role. `stop` is abrupt: open calls fail, as they do when a process dies."""

    def __init__(
        self, role: Role, num_blocks: int = 64, config: WorkerConfig | None = None, runner: FakeRunner | None = None
    ) -> None:
        self.runner = runner or FakeRunner(num_blocks)
        self.config = config or WorkerConfig(transfer_timeout_s=2.0, max_num_batched_tokens=64)
        self._server = Server(self.config)
        address = Address("127.0.0.1", self._server.bind("127.0.0.1", 0))
        self.worker = Worker(self.config, role, self.runner, address)  # type: ignore[arg-type]
        self.num_free_at_start = self.worker.engine.load().num_free_blocks
        self._front = Front([])

    async def start(self) -> FakeWorker:
        make_front = prefill_front if self.worker.role is Role.PREFILL else decode_front
        return await self.start_with(make_front(self.worker))

    async def start_with(self, front: Front) -> FakeWorker:
        self._front = front
        for service in front.services:
            self._server.add(service.register, service.servicer, service.name)
        await self._server.start()
        self.worker.engine.start()
        return self

    async def stop(self) -> None:
        if isinstance(self.runner, FakeRunner):
            self.runner.gate.set()
        await self._server.stop(0)
        await self._front.close()
        await self.worker.channels.close()
        self.worker.engine.stop()
        if isinstance(self.runner, FakeAsyncRunner):
            self.runner.close()

    def info(self) -> WorkerInfo:
        return self.worker.info(self._front.transports)

    def is_idle(self) -> bool:
        """No step is in flight: its sequences' blocks have been given back."""
        return self.worker.engine.load().num_free_blocks == self.num_free_at_start

    def check_baseline(self) -> None:
        """Nothing is held, reserved or running, and every block that was free at the start is free again."""
        self.worker.engine.check()
        load = self.worker.engine.load()
        assert load.num_free_blocks == self.num_free_at_start
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert self.worker.engine.num_reserved_and_held() == (0, 0)


class StaticWatcher:
    """A registry view that the test edits."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}

    def is_stale(self, worker_id: str) -> bool:
        return False


class NoPrefixes:
    async def longest_prefix(self, workers: Sequence[WorkerInfo], hashes: Sequence[bytes]) -> dict[str, int]:
        return {}


class Cluster:
    """Some workers and a router's dispatcher over them."""

    def __init__(self, cluster_secret: str = "") -> None:
        self.watcher = StaticWatcher()
        self.channels = Channels(PeerConfig(cluster_secret=cluster_secret))
        self._config = WorkerConfig(transfer_timeout_s=2.0, max_num_batched_tokens=64, cluster_secret=cluster_secret)
        self.fleet = Fleet(self.watcher, NoPrefixes(), self.channels, always_hand_off=True)  # type: ignore[arg-type]
        self.dispatcher = Dispatcher(self.fleet, worker_wait_s=5.0)
        self.workers: list[FakeWorker] = []
        self.closers: list[Callable[[], Awaitable[None]]] = []

    async def add(self, role: Role, num_blocks: int = 64, **kwargs: object) -> FakeWorker:
        worker = await FakeWorker(role, num_blocks, **{"config": self._config, **kwargs}).start()  # type: ignore[arg-type]
        self.workers.append(worker)
        self.announce(worker)
        return worker

    def announce(self, worker: FakeWorker) -> None:
        self.watcher.workers[worker.info().worker_id] = worker.info()
        self.fleet.notify_change(worker.info().worker_id)

    def announce_info(self, info: WorkerInfo, address: str) -> WorkerInfo:
        """A worker that is none of ours, at this address."""
        info = replace(info, address=address)
        self.watcher.workers[info.worker_id] = info
        self.fleet.notify_change(info.worker_id)
        return info

    def at_end(self, closer: Callable[[], Awaitable[None]]) -> None:
        self.closers.append(closer)

    async def remove(self, worker: FakeWorker, forget: bool = True) -> None:
        if forget:
            self.watcher.workers.pop(worker.info().worker_id)
            self.fleet.notify_change(worker.info().worker_id)
        self.workers.remove(worker)
        await worker.stop()

    async def run(self, request: Request, deadline_s: float = 20.0) -> dict[int, list[int]]:
        """Token ids by choice; asserts that indices are gapless and every choice ends once."""
        return collect_tokens([o async for o in self.dispatcher.generate(request, deadline_s)], request)


def collect_tokens(outputs: Sequence[Output], request: Request) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {choice: [] for choice in range(request.sampling.n)}
    finished: list[int] = []
    for output in outputs:
        for token in output.tokens:
            assert token.index == len(tokens[output.choice]) + request.num_emitted
            tokens[output.choice].append(token.token_id)
        if output.finish_reason is not None:
            finished.append(output.choice)
    assert sorted(finished) == list(range(request.sampling.n))
    return tokens


@asynccontextmanager
async def cluster(cluster_secret: str = "") -> AsyncIterator[Cluster]:
    made = Cluster(cluster_secret)
    try:
        yield made
    finally:
        await made.dispatcher.stop()
        for worker in list(made.workers):
            await worker.stop()
        for closer in made.closers:
            await closer()
        await made.channels.close()


def request(prompt: Sequence[int], max_tokens: int = 8, **sampling: object) -> Request:
    params = replace(SamplingParams(max_tokens=max_tokens, temperature=0.0), **sampling)  # type: ignore[arg-type]
    return Request(f"r{next(_ids)}", tuple(prompt), len(prompt), params)


def prompt_of(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 1000 for i in range(num_tokens)]


__all__ = ["GEOMETRY", "Cluster", "FakeWorker", "cluster", "collect_tokens", "prompt_of", "request"]
