"""Workers that are split over devices: whatever the two sides' splits, every head of every block arrives where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.base.errors import CorruptTransfer
from shared.base.request import Token
from shared.transfer.handoff.setup import make_acceptors
from shared.transfer.transports.interface import GRPC, SHM
from tests.support.fake_runner import GEOMETRY
from tests.support.pair import PAIR_TRANSPORTS, all_heads, config_of, empty_group, finish, pair, split_pool

SIX_HEADS = replace(GEOMETRY, num_kv_heads=6)
SPLITS = ((6,), (2, 4), (1, 2, 3))


@pytest.mark.parametrize("transport", PAIR_TRANSPORTS)
class TestSplits:
    @pytest.mark.parametrize("to", SPLITS, ids=str)
    @pytest.mark.parametrize("by", [(6,), (4, 2), (3, 1, 2)], ids=str)
    async def test_heads_of_any_split_arrive_in_pools_of_any_other(
        self, transport: str, by: tuple[int, ...], to: tuple[int, ...]
    ) -> None:
        pools = empty_group(SIX_HEADS, to)
        async with pair(transport, geometry=SIX_HEADS, pools=pools) as both:
            both.expect(100)
            shards, whole = split_pool(both.pool, by)
            sender = both.sender(shards=shards)
            await sender.open(7)
            blocks = both.reserved_blocks()
            await finish(sender, 0, list(range(40, 47)), num_blocks_each=3)
            assert sender.transport == transport
            assert torch.equal(all_heads(pools)[blocks], whole[40:47])
            others = sorted(set(range(64)) - set(blocks))
            assert not all_heads(pools)[others].any()
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    async def test_layers_that_come_one_by_one_are_put_together(self, transport: str) -> None:
        pools = empty_group(SIX_HEADS, (4, 2))
        async with pair(transport, geometry=SIX_HEADS, pools=pools) as both:
            both.expect(40)
            shards, whole = split_pool(both.pool, (1, 5))
            sender = both.sender(shards=shards)
            await sender.open(3)
            blocks = both.reserved_blocks()
            sender._max_chunk_bytes = 1
            await finish(sender, 0, [9, 4, 30])
            assert torch.equal(all_heads(pools)[blocks], whole[[9, 4, 30]])
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    @pytest.mark.parametrize("missing", [0, 1, 2])
    async def test_blocks_without_the_heads_of_one_shard_are_not_complete(self, transport: str, missing: int) -> None:
        pools = empty_group(SIX_HEADS, (3, 3))
        async with pair(transport, geometry=SIX_HEADS, pools=pools) as both:
            both.expect(100)
            shards, _ = split_pool(both.pool, (2, 3, 1))
            sender = both.sender(shards=shards)
            await sender.open(7)
            sender._shards = [shard for index, shard in enumerate(shards) if index != missing]
            await sender.push(0, list(range(40, 47)))
            with pytest.raises(CorruptTransfer, match="7 blocks missing"):
                await sender.commit([Token(0, 7)], 0)
            await sender.abort("test")
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()


async def test_pools_of_which_one_cannot_be_mapped_are_not_offered_as_shared_memory() -> None:
    mixed = empty_group(SIX_HEADS, (3, 3))
    acceptors = make_acceptors(config_of("auto"), mixed, "boot", lambda: "127.0.0.1")
    assert SHM in acceptors.transports
    await acceptors.close()
    mixed.shards[1].pool.shared_storage = None
    acceptors = make_acceptors(config_of("auto"), mixed, "boot", lambda: "127.0.0.1")
    assert SHM not in acceptors.transports
    assert GRPC in acceptors.transports
    await acceptors.close()
