"""Whether all that was taken has been given back: blocks and reservations as workers count them, the rest as the kernel does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shared.index.connection import MAX_CONNECTIONS
from tests.chaos.site import Site
from tests.support.eventually import eventually

# gRPC's own threads and wake-up descriptors come and go with the load of the last seconds. A pool of connections to Redis keeps as
# many as were ever needed at once, and that need not have been all of them before the faults.
_THREAD_SLACK = 4
_FD_SLACK = 4 + MAX_CONNECTIONS
_IDLE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Footprint:
    num_fds: int
    num_threads: int
    num_shared_maps: int  # of memory that other processes may write to


def footprints(site: Site) -> dict[str, Footprint]:
    """By name of the process."""
    return {part.name: _footprint(part.pid) for part in site.parts}


def _footprint(pid: int) -> Footprint:
    process = psutil.Process(pid)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line for line in maps if "/memfd:" in line or "/dev/shm/" in line]
    return Footprint(process.num_fds(), process.num_threads(), len(shared))


def compare(before: Mapping[str, Footprint], after: Mapping[str, Footprint]) -> list[str]:
    """What has grown, in words."""
    grown = []
    for name, then in before.items():
        now, limits = asdict(after[name]), asdict(then)
        slack = {"num_fds": _FD_SLACK, "num_threads": _THREAD_SLACK, "num_shared_maps": 0}
        grown += [f"{name}: {key} was {limits[key]}, is {now[key]}" for key in now if now[key] > limits[key] + slack[key]]
    return grown


async def busy(site: Site) -> list[str]:
    """What workers still hold, in words."""
    held = []
    for worker in site.workers:
        s = await worker.status()
        num_taken = s.num_blocks - 1 - s.num_free_blocks  # block 0 belongs to nobody
        if num_taken or s.num_running or s.num_waiting or s.num_reservations or s.num_held:
            held.append(
                f"{worker.name}: {num_taken} blocks taken, {s.num_running} running, {s.num_waiting} waiting, "
                f"{s.num_reservations} reserved, {s.num_held} held"
            )
    return held


async def settle(site: Site) -> list[str]:
    """What workers still hold after the longest time that a lease may last; empty if nothing."""

    async def is_idle() -> bool:
        return not await busy(site)

    try:
        await eventually(is_idle, _IDLE_TIMEOUT_S)
    except AssertionError:
        return await busy(site)
    return []
