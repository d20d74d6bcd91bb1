"""Two processes and a torch.distributed process group of their own: NCCL between GPUs, gloo between CPUs.

There is no global group: each pair has its own store and its own group, so peers come and go without anyone else noticing. Blocking
calls run on one thread of the communicator, never on the event loop. What has failed or timed out is never used again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from shared.transfer.transports.interface import GLOO, LinkLost

log = logging.getLogger(__name__)

T = TypeVar("T")

RECEIVER_RANK, SENDER_RANK = 0, 1


class Communicator:
    """`rank` is this process's; the other one's is 1 - rank. Methods raise LinkLost."""

    def __init__(self, backend: str, device: torch.device, rank: int, timeout_s: float) -> None:
        self._backend = backend
        self._device = device
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._thread = _CallThread(f"{backend}-link")
        self._group: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL: torch has no types for what they share
        self.is_alive = True

    async def join(self, make_store: Callable[[], Store], address: str) -> None:
        """Meets the other process at the store. `address` is where this machine is reached (gloo)."""

        def join() -> None:
            self._group = _make_group(self._backend, make_store(), self._rank, self._timeout, address)

        await self._call(join)

    async def send(self, data: Tensor) -> None:
        await self._call(lambda: self._wait(self._joined().send([data], 1 - self._rank, 0)))

    async def receive(self, size_bytes: int) -> Tensor:
        """[size_bytes] uint8, in a buffer of its own: on a GPU in its memory."""

        def receive() -> Tensor:
            buffer = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            self._wait(self._joined().recv([buffer], 1 - self._rank, 0))
            return buffer

        return await self._call(receive)

    def discard(self) -> None:
        """What is under way fails, at once (NCCL) or at its timeout (gloo), on the thread. Idempotent."""
        if not self.is_alive:
            return
        self.is_alive = False
        if self._group is not None and self._backend != GLOO:
            self._group.abort()  # ends kernels that wait for a peer that never comes
        self._group = None
        self._thread.stop()

    def _joined(self) -> Any:
        if self._group is None:
            raise LinkLost("the communicator has been thrown away")
        return self._group

    def _wait(self, work: dist.Work) -> None:
        work.wait(self._timeout)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # `wait` only orders streams

    async def _call(self, function: Callable[[], T]) -> T:
        if not self.is_alive:
            raise LinkLost("the communicator has been thrown away")
        try:
            return await self._thread.run(function)
        except RuntimeError as error:  # torch's DistError, a timeout or a closed connection
            self.discard()
            raise LinkLost(f"{self._backend}: {str(error).splitlines()[0]}") from None
        except asyncio.CancelledError:  # half of a message may be under way: the two would no longer be in step
            self.discard()
            raise


def serve_store(host: str, link_id: bytes, timeout_s: float) -> tuple[Store, int]:
    """A rendezvous of one pair, and the port that it is at. It ends with its last user. Listens at `host` alone: a store that makes
    its own socket listens on every interface."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        ip, port = listener.getsockname()[:2]
        return _store(ip, port, link_id, timeout_s, is_master=True, master_listen_fd=listener.detach()), port


def connect_store(host: str, port: int, link_id: bytes, timeout_s: float) -> Store:
    return _store(host, port, link_id, timeout_s, is_master=False)


def _store(host: str, port: int, link_id: bytes, timeout_s: float, **options: Any) -> Store:
    """The pair's keys begin with its random id, so that a late message of another pair is not found. It is no protection: a store
    lists its keys to whoever reaches the port (SECURITY.md)."""
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **options)  # type: ignore[attr-defined]
    return dist.PrefixStore(link_id.hex(), store)  # type: ignore[attr-defined]


def _make_group(backend: str, store: Store, rank: int, timeout: timedelta, address: str) -> Any:
    if backend == GLOO:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._threads = 1
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, 2, options)
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, nccl)


class _CallThread:
    """Runs functions one after the other. A daemon, because one of them may hang until its timeout while the process ends."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            result, error = None, None
            try:
                result = function()
            except Exception as raised:
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.put(call)
        return await future

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
