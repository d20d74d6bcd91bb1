"""Everything that goes wrong, each kind a small class: `strike` injects it, lets it last, and heals it.

A strike draws what it needs from its own random numbers, and says in a few words what it did.
"""

from __future__ import annotations

import asyncio
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from shared.index.connection import connect
from tests.chaos.chunk_fault import ChunkFault
from tests.chaos.load import Load
from tests.chaos.site import Site, SiteWorker


class Fault(ABC):
    weight: ClassVar[int] = 1  # how often, compared with others

    @abstractmethod
    async def strike(self, site: Site, load: Load, rng: random.Random) -> str: ...


@asynccontextmanager
async def _victim(workers: Sequence[SiteWorker], rng: random.Random) -> AsyncIterator[SiteWorker]:
    """One of the workers, free of other faults to its process, if there is one; else in turn."""
    free = [worker for worker in workers if not worker.lock.locked()]
    worker = rng.choice(free or list(workers))
    async with worker.lock:
        yield worker


class KillWorker(Fault):
    """SIGKILL; a supervisor starts it again."""

    weight = 3

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with _victim(site.workers, rng) as worker:
            await site.end(worker.part, worker.part.kill)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await worker.part.start()
        return worker.name


class DrainWorker(Fault):
    """SIGTERM, and a replacement: one step of a rolling restart."""

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with _victim(site.workers, rng) as worker:
            await site.end(worker.part, worker.part.stop)
            await worker.part.start()
        return worker.name


class FreezeWorker(Fault):
    """SIGSTOP: the process is there, its connections stand, and nothing moves. Then SIGCONT."""

    weight = 3

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with _victim(site.workers, rng) as worker:
            duration_s = rng.choice([0.1, 0.5, 1.5, 4.0]) * rng.uniform(0.5, 1.5)
            worker.part.signal(signal.SIGSTOP)
            await asyncio.sleep(duration_s)
            worker.part.signal(signal.SIGCONT)
        return f"{worker.name} for {duration_s:.1f} s"


class ResetConnections(Fault):
    """All TCP connections to a worker end with RST."""

    weight = 3

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        worker = rng.choice(site.workers)
        worker.relay.reset()
        return worker.name


class StallConnections(Fault):
    """Nothing gets through to a worker or back, and nobody is told."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        worker, duration_s = rng.choice(site.workers), rng.choice([0.3, 1.0, 4.0]) * rng.uniform(0.5, 1.5)
        worker.relay.stall()
        await asyncio.sleep(duration_s)
        worker.relay.flow()
        return f"{worker.name} for {duration_s:.1f} s"


class DelayConnections(Fault):
    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        worker, delay_s = rng.choice(site.workers), rng.uniform(0.005, 0.15)
        worker.relay.delay_s = delay_s
        await asyncio.sleep(rng.uniform(0.5, 2.0))
        worker.relay.delay_s = 0.0
        return f"{worker.name} by {1e3 * delay_s:.0f} ms"


class RefuseConnections(Fault):
    """Connections end, and new ones are refused: a network partition."""

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        worker, duration_s = rng.choice(site.workers), rng.uniform(0.3, 2.0)
        worker.relay.is_refusing = True
        worker.relay.reset()
        await asyncio.sleep(duration_s)
        worker.relay.is_refusing = False
        return f"{worker.name} for {duration_s:.1f} s"


class LosePackets(Fault):
    """Some packets between two network namespaces are lost, or all of them, and the others come late."""

    weight = 3

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        wire = next(worker.wire for worker in site.workers if worker.wire is not None)
        wire.loss, wire.delay_s = rng.choice([0.05, 0.2, 1.0]), rng.choice([0.0, 0.01, 0.05])
        duration_s = rng.uniform(0.5, 3.0)
        words = f"{100 * wire.loss:.0f}% lost, {1e3 * wire.delay_s:.0f} ms late, for {duration_s:.1f} s"
        await asyncio.sleep(duration_s)
        wire.loss = wire.delay_s = 0.0
        return words


class BreakChunks(Fault):
    """One prefill worker's chunks are corrupt, come twice, come late, or are missing."""

    weight = 4

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        fault = rng.choice(list(ChunkFault))
        site.break_chunks(fault)
        await asyncio.sleep(rng.uniform(0.3, 1.0))
        site.break_chunks(None)
        return fault.value


class FillPools(Fault):
    """Many more requests at once than blocks."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        count = rng.randrange(16, 40)
        await load.burst(count, rng)
        return f"{count} requests more"


class ClientsLeave(Fault):
    """Clients disconnect in every phase."""

    weight = 3

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        count = rng.randrange(5, 15)
        await asyncio.gather(*(load.leave(random.Random(rng.random())) for _ in range(count)))
        return f"{count} clients"


class KillRedis(Fault):
    """And an empty one takes its place."""

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with site.valkey_lock:
            await site.valkey.kill()
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            await site.valkey.start()
        return ""


class FlushRedis(Fault):
    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with site.valkey_lock:
            client = connect(site.valkey.url)
            await client.flushall()
            await client.aclose()
        return ""


class FreezeRedis(Fault):
    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with site.valkey_lock:
            duration_s = rng.uniform(0.2, 3.0)
            site.valkey.freeze()
            await asyncio.sleep(duration_s)
            site.valkey.thaw()
        return f"for {duration_s:.1f} s"


class KillRouter(Fault):
    """Clients come back to the one that takes its place."""

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with site.router_lock:
            site.router_is_up.clear()
            site.num_router_kills += 1
            await site.end(site.router, site.router.kill)
            await site.router.start()
            await site.wait_ready()
        return ""


EVERYWHERE: tuple[type[Fault], ...] = (
    KillWorker,
    DrainWorker,
    FreezeWorker,
    ResetConnections,
    StallConnections,
    DelayConnections,
    RefuseConnections,
    BreakChunks,
    FillPools,
    ClientsLeave,
    KillRedis,
    FlushRedis,
    FreezeRedis,
    KillRouter,
)
