"""What a large fleet costs a router.

    python -m bench.fleet [--workers 1000] [--placements 5000] [--idle-s 10] [--json FILE]

    Valkey ─ heartbeats of fake workers, in another process ─> FleetWatcher ─> Fleet ─> placements, one at a time

Five figures: the share of a core that hearing the heartbeats takes, the time that a choice among what is known computes and that
the hashing of its prompt does (nothing else of the process runs meanwhile), the time of the lookup of the prefix in Valkey that
precedes the choice, and the process' peak memory. A prompt is *found* if the lookup names the one worker that holds it.
"""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.fleet.fake_workers import BLOCK_SIZE, MODEL, PROMPT_TOKENS, prompt_of
from bench.load.report import write_json
from services.local.valkey import ValkeyAddress, ValkeyServer
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.pools import Group
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import WorkerId, WorkerInfo
from shared.index.keys import Keys
from shared.index.prefix_index import PrefixLookup
from shared.index.watcher import FleetWatcher
from shared.options.config import exit_on_config_error, option, parse_config
from shared.options.peers import PeerConfig
from shared.wire.channels import Channels

PROG = "python -m bench.fleet"
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Measures what a large fleet costs a router."""

    workers: int = option(1000, "fake workers, a third of them for prefill")
    placements: int = option(5000, "requests that are placed, one after another")
    idle_s: float = option(10.0, "how long heartbeats alone are measured")
    json: str = option("", "also write the figures to this file")

    def __post_init__(self) -> None:
        if self.workers < 2 or self.placements < 100 or self.idle_s <= 0:
            raise ValueError("--workers must be at least 2, --placements at least 100, and --idle-s above 0")


@dataclass(frozen=True, slots=True)
class Figures:
    num_workers: int
    heartbeats_per_s: float
    heartbeat_cpu_share: float  # of one core
    choice_p50_ms: float
    choice_p99_ms: float
    hash_p50_ms: float
    hash_p99_ms: float
    lookup_p50_ms: float
    lookup_p99_ms: float
    found_share: float
    peak_rss_mib: float


class _Timed:
    """A prefix index that leaves out its own time: what remains of a placement is the choice."""

    def __init__(self, lookup: PrefixLookup) -> None:
        self._lookup = lookup
        self.elapsed_s = 0.0
        self.found: dict[WorkerId, int] = {}  # by the last lookup

    async def longest_prefix(self, workers: Sequence[WorkerInfo], hashes: Sequence[bytes]) -> dict[WorkerId, int]:
        with self._timed():
            self.found = await self._lookup.longest_prefix(workers, hashes)
        return self.found

    async def recent_holders(self, hashes: Sequence[bytes]) -> list[bytes]:
        with self._timed():
            return await self._lookup.recent_holders(hashes)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_at = time.perf_counter()
        yield
        self.elapsed_s += time.perf_counter() - began_at


class _TimedFleet(Fleet):
    """Leaves the hashing of prompts out of the choice."""

    hash_s = 0.0  # of the last prompt

    def _hashes(self, group: Group, request: Request) -> list[bytes]:
        began_at = time.perf_counter()
        hashes = super()._hashes(group, request)
        self.hash_s = time.perf_counter() - began_at
        return hashes


class _Router:
    """What of a router has to do with the fleet."""

    def __init__(self, redis_url: str) -> None:
        self.num_heartbeats = 0
        self._lookup = PrefixLookup(redis_url, Keys())
        self._index = _Timed(self._lookup)
        self.watcher = FleetWatcher(redis_url, Keys(), self._heard)
        self._fleet = _TimedFleet(self.watcher, self._index, Channels(PeerConfig()))  # type: ignore[arg-type]

    def _heard(self, worker_id: WorkerId) -> None:
        self.num_heartbeats += 1
        self._fleet.notify_change(worker_id)

    async def all_heard(self, num_workers: int) -> None:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while len(self.watcher.workers) < num_workers:
                await self._fleet.next_change_of_members().wait()

    async def place(self, holder: int, number: int) -> tuple[float, float, float, bool]:
        """Seconds that the choice computes, that hashing does, and that the lookup takes, and whether the holder was found."""
        prompt = prompt_of(holder)
        request = Request(f"request-{number}", prompt, len(prompt), SamplingParams(), model=MODEL)
        self._index.elapsed_s, began_at = 0.0, time.perf_counter()
        await self._fleet.place(request)
        choice_s = time.perf_counter() - began_at - self._index.elapsed_s - self._fleet.hash_s
        is_found = self._index.found.get(WorkerId(f"worker-{holder}")) == len(prompt) // BLOCK_SIZE
        return choice_s, self._fleet.hash_s, self._index.elapsed_s, is_found

    async def close(self) -> None:
        await self.watcher.stop()
        await self._lookup.close()


async def measure(config: FleetConfig) -> Figures:
    async with _valkey() as url, _fake_workers(url, config.workers):
        router = _Router(url)
        await router.watcher.start()
        await router.all_heard(config.workers)
        await asyncio.sleep(3.0)  # the workers send their caches once more when they see how many they are
        cpu_s, heard, began_at = time.process_time(), router.num_heartbeats, time.perf_counter()
        await asyncio.sleep(config.idle_s)
        wall_s = time.perf_counter() - began_at
        cpu_share, heartbeats_per_s = (time.process_time() - cpu_s) / wall_s, (router.num_heartbeats - heard) / wall_s
        rng = random.Random(1)
        placed = [await router.place(rng.randrange(config.workers), number) for number in range(config.placements)]
        await router.close()
    choices, hashings, lookups, are_found = zip(*placed, strict=True)
    return Figures(
        config.workers,
        heartbeats_per_s,
        cpu_share,
        choice_p50_ms=1000 * statistics.median(choices),
        choice_p99_ms=1000 * _p99(choices),
        hash_p50_ms=1000 * statistics.median(hashings),
        hash_p99_ms=1000 * _p99(hashings),
        lookup_p50_ms=1000 * statistics.median(lookups),
        lookup_p99_ms=1000 * _p99(lookups),
        found_share=sum(are_found) / len(are_found),
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


@asynccontextmanager
async def _valkey() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="valkey-") as folder:
        server = ValkeyServer(ValkeyAddress(unix_socket=Path(folder, "socket")))
        await server.start()
        try:
            yield server.address.url
        finally:
            await server.stop()


@asynccontextmanager
async def _fake_workers(redis_url: str, num_workers: int) -> AsyncIterator[None]:
    command = (sys.executable, "-m", "bench.fleet.fake_workers", redis_url, str(num_workers))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def show(figures: Figures) -> str:
    return "\n".join(
        (
            f"{figures.num_workers} workers, prompts of {PROMPT_TOKENS} tokens in blocks of {BLOCK_SIZE}",
            f"heartbeats   {figures.heartbeats_per_s:6.0f} per s   {figures.heartbeat_cpu_share:6.1%} of a core",
            f"choice       {figures.choice_p50_ms:6.3f} ms p50   {figures.choice_p99_ms:6.3f} ms p99",
            f"hashing      {figures.hash_p50_ms:6.3f} ms p50   {figures.hash_p99_ms:6.3f} ms p99",
            f"lookup       {figures.lookup_p50_ms:6.3f} ms p50   {figures.lookup_p99_ms:6.3f} ms p99",
            f"found        {figures.found_share:6.1%} of the holders",
            f"memory       {figures.peak_rss_mib:6.0f} MiB at most",
        )
    )


def main(argv: Sequence[str]) -> None:
    config = parse_config(FleetConfig, argv, PROG)
    figures = asyncio.run(measure(config))
    print(show(figures))
    if config.json:
        write_json(Path(config.json), asdict(figures))


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
