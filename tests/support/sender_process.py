"""A sender in a process of its own, which a test can stop and kill. Obeys one command a line and answers each with a line.

python -m tests.support.sender_process ADDRESS BOOT_ID TRANSPORT [DEVICE]
fill SEED                        makes the pool the random one of that seed, instead of full of ones
open TRANSFER_HEX NUM_BLOCKS     reserves at the receiver
push FIRST_BLOCK NUM_BLOCKS      ships the pool's blocks 1, 2, …
storm                            ships the same block's bytes again and again until it is told to stop, then says how it ended
"""

from __future__ import annotations

import asyncio
import sys

import torch

from shared.base.errors import TwostrokeError
from shared.engine.memory.kv_pool import KvPool
from shared.kernels.reference import ReferenceKernels
from shared.options.peers import PeerConfig
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, kv_pb2
from shared.transfer.handoff.links import Links
from shared.transfer.handoff.sender import Sender
from shared.transfer.handoff.setup import make_links
from shared.transfer.transports.heads import HeadShard
from shared.transfer.transports.interface import CUDA_IPC
from shared.wire.channels import Channels
from tests.support.fake_device import fake_cuda_connector
from tests.support.fake_runner import GEOMETRY
from tests.support.pair import random_pool


async def _discard() -> None:
    """A header that is never sent."""


async def _storm(sender: Sender, pool: KvPool) -> str:
    """Writes one block with all haste, as a sender does that has not heard of its attempt's end."""
    assert sender._writer is not None
    num_written = 0
    try:
        while True:
            chunk = kv_pb2.Chunk(first_block=0, num_blocks=1, num_layers=GEOMETRY.num_layers, num_heads=GEOMETRY.num_kv_heads)
            await sender._writer.ship(chunk, pool, [1], _discard)
            num_written += 1
            await asyncio.sleep(0)
    except TwostrokeError as error:
        return f"ended after {num_written} writes by {type(error).__name__}"


async def main(address: str, boot_id: str, transport: str, device: str = "cpu") -> None:
    pool = KvPool(GEOMETRY, 64, torch.device(device), ReferenceKernels())
    pool.kv.fill_(1.0)
    if transport == CUDA_IPC and device == "cpu":
        links = Links([fake_cuda_connector(GEOMETRY)])
    else:
        config = WorkerConfig(transport=transport, transfer_timeout_s=5.0)
        links = make_links(config, pool, lambda: "127.0.0.1")
    channels = Channels(PeerConfig())
    sender: Sender | None = None
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        match line:
            case ["fill", seed]:
                pool.blocks.copy_(random_pool(GEOMETRY, int(seed)).blocks)
                answer = "filled"
            case ["open", transfer, num_blocks]:
                destination = control_pb2.Destination(transfer_id=bytes.fromhex(transfer), boot_id=boot_id)
                sender = Sender(links, channels.get(address), destination, GEOMETRY, [HeadShard(pool)], 5.0)
                answer = f"cached {await sender.open(int(num_blocks))}"
            case ["push", first, count] if sender is not None:
                await sender.push(int(first), list(range(1, int(count) + 1)))
                answer = f"pushed by {sender.transport}"
            case ["storm"] if sender is not None:
                print("storming", flush=True)
                answer = await _storm(sender, pool)
            case _:
                answer = f"cannot {line}"
        print(answer, flush=True)
    await links.close()
    await channels.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
