"""Many workers in one process, as far as Redis can tell: `python -m bench.fleet.fake_workers REDIS_URL NUM_WORKERS`.

Worker i is a prefill worker if 3 divides i, else a decode worker, and holds the blocks of prompt i.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys

import uvloop

from shared.base.block_hash import block_hashes, hash_seed
from shared.base.worker_info import BootId, Load, Role, WorkerId, WorkerInfo
from shared.index.keys import Keys
from shared.index.registration import HEARTBEAT_S, Registration

MODEL = "bench"
DIGEST = "d" * 32
BLOCK_SIZE = 16
PROMPT_TOKENS = 1024


def prompt_of(worker: int) -> range:
    return range(worker * PROMPT_TOKENS, (worker + 1) * PROMPT_TOKENS)


class _FilledCache:
    """Reports its blocks once."""

    def __init__(self, worker: int) -> None:
        self._new = block_hashes(hash_seed(DIGEST), prompt_of(worker), BLOCK_SIZE)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        stored, self._new = self._new, []
        return stored, []


def _info(worker: int) -> WorkerInfo:
    load = Load(
        num_running=random.randrange(24),
        num_waiting_tokens=random.randrange(4000),
        num_free_blocks=random.randrange(2000, 4000),
        prefill_tokens_per_s=20_000.0,
    )
    return WorkerInfo(
        WorkerId(f"worker-{worker}"),
        BootId(f"{worker:016x}"),
        Role.DECODE if worker % 3 else Role.PREFILL,
        f"10.0.{worker // 250}.{worker % 250 + 1}:7001",
        MODEL,
        DIGEST,
        BLOCK_SIZE,
        num_blocks=4000,
        max_model_len=32_768,
        max_num_seqs=32,
        load=load,
    )


async def _register(redis_url: str, num_workers: int) -> None:
    registrations = [
        Registration(redis_url, lambda i=i: _info(i), _FilledCache(i), Keys(), flush_s=HEARTBEAT_S)  # type: ignore[misc]
        for i in range(num_workers)
    ]
    for registration in registrations:  # spread over a second, as real ones are
        await registration.start()
        await asyncio.sleep(HEARTBEAT_S / num_workers)
    await asyncio.Event().wait()


def main(redis_url: str, num_workers: str) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each worker
    uvloop.run(_register(redis_url, int(num_workers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
