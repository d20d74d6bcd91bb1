"""CUDA IPC for real: this process receives in a pool on the GPU, and another one, on the same GPU, writes into it.

Run by `python -m bench.kernels.gpu_check`; the name keeps pytest from collecting it where there is no GPU.
"""

from __future__ import annotations

import pytest
import torch

from shared.engine.memory.kv_pool import KvPool
from shared.engine.memory.pool_memory import zeroed_storage
from shared.kernels.reference import ReferenceKernels
from shared.transfer.transports.heads import PoolGroup
from tests.support.eventually import eventually
from tests.support.fake_runner import GEOMETRY
from tests.support.pair import Pair, answer, ask, pair, random_pool, sender_process

DEVICE = "cuda"
STORAGE = zeroed_storage
TRANSFER = b"t" * 16


def pool_on_device() -> KvPool:
    return KvPool(GEOMETRY, 64, torch.device(DEVICE), ReferenceKernels(), STORAGE)


def found(pool: KvPool, blocks: list[int]) -> torch.Tensor:
    return pool.kv[blocks].cpu()


async def committed_is_baseline(both: Pair) -> None:
    both.receiver.forget(TRANSFER)
    await both.is_baseline()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_blocks_of_another_process_arrive_bit_for_bit(seed: int) -> None:
    pool = pool_on_device()
    async with pair("cuda-ipc", pools=PoolGroup.of(pool)) as both, sender_process(both, "cuda-ipc", DEVICE) as process:
        both.expect(400)
        assert await ask(process, f"fill {seed}") == "filled"
        assert await ask(process, f"open {TRANSFER.hex()} 25") == "cached 0"
        blocks = both.reserved_blocks()
        assert await ask(process, "push 0 10") == "pushed by cuda-ipc"
        assert await ask(process, "push 10 15") == "pushed by cuda-ipc"
        await eventually(lambda: both.num_missing() == 0)
        sent = random_pool(GEOMETRY, seed).blocks
        assert torch.equal(pool.blocks[blocks].cpu(), torch.cat([sent[1:11], sent[1:16]]))
        others = sorted(set(range(64)) - set(blocks))
        assert not found(pool, others).any()
        await committed_is_baseline(both)


async def test_nothing_is_written_after_the_fence() -> None:
    pool = pool_on_device()
    async with pair("cuda-ipc", pools=PoolGroup.of(pool), lease_s=0.5) as both, sender_process(both, "cuda-ipc", DEVICE) as process:
        both.expect(100)
        await ask(process, f"open {TRANSFER.hex()} 7")
        blocks = both.reserved_blocks()
        assert await ask(process, "storm") == "storming"
        await both.is_baseline()
        pool.kv[blocks] = 2.0
        assert (await answer(process)).endswith("by StaleTransfer")
        assert bool((found(pool, blocks) == 2.0).all())


async def test_killed_sender_frees_its_blocks_and_writes_no_more() -> None:
    pool = pool_on_device()
    async with (
        pair("cuda-ipc", pools=PoolGroup.of(pool), lease_s=60.0) as both,
        sender_process(both, "cuda-ipc", DEVICE) as process,
    ):
        both.expect(100)
        await ask(process, f"open {TRANSFER.hex()} 7")
        blocks = both.reserved_blocks()
        await ask(process, "storm")
        process.kill()
        await both.is_baseline()
        pool.kv[blocks] = 2.0
        await process.wait()
        assert bool((found(pool, blocks) == 2.0).all())
