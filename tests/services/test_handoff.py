"""The handoff over real gRPC: what arrives is what was computed, and whatever goes wrong, both sides return to baseline."""

from __future__ import annotations

import asyncio

import pytest
import xxhash

from shared.base.errors import CorruptTransfer, IncompatiblePeer, InvalidRequest, Overloaded, StaleTransfer
from shared.base.worker_info import Role
from shared.rpc import kv_pb2
from shared.transfer.handoff import metrics
from shared.transfer.handoff.receiver import Receiver
from shared.transfer.transports.heads import PoolGroup
from tests.support.cluster import Cluster, FakeWorker, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import GEOMETRY, expected_tokens
from tests.support.messages import BOOT, chunk_of, geometry_of, key_of


def received_bytes() -> float:
    return sum(metrics.transferred_bytes.labels("received", name)._value.get() for name in ("grpc", "gloo", "shm"))


async def settle(made: Cluster) -> None:
    """Waits until every stream has been closed by its server."""
    async with asyncio.timeout(5):
        for worker in made.workers:
            await worker.worker.streams.wait_idle()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 200])
async def test_handed_over_prompt_continues_with_the_right_tokens(length: int) -> None:
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        asked = request(prompt_of(length))
        tokens = await made.run(asked)
        assert tokens[0] == expected_tokens(asked.token_ids, 8)
        assert prefill.runner.num_steps > 0
        await settle(made)
        for worker in made.workers:
            worker.check_baseline()


async def test_n_outputs_share_one_prompt_and_differ_by_seed() -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        asked = request(prompt_of(40), n=3, seed=5)
        tokens = await made.run(asked)
        assert tokens == {c: expected_tokens(asked.token_ids, 8, seed=5, choice=c) for c in range(3)}
        await settle(made)
        for worker in made.workers:
            worker.check_baseline()


async def test_second_request_with_the_same_prefix_ships_only_new_blocks() -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        shared = prompt_of(64)
        await made.run(request([*shared, 1]))
        asked = request([*shared, 2, 3])
        outputs = [o async for o in made.dispatcher.generate(asked, 20)]
        assert outputs[0].num_cached_tokens == 64
        assert [t.token_id for o in outputs for t in o.tokens] == expected_tokens(asked.token_ids, 8)


@pytest.mark.parametrize("length", [16, 64])
async def test_a_prompt_of_whole_blocks_that_both_sides_have_gets_the_same_tokens_again(length: int) -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        for _ in range(3):
            asked = request(prompt_of(length))
            assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
        await settle(made)
        for worker in made.workers:
            worker.check_baseline()


@pytest.mark.parametrize("replaced", [Role.PREFILL, Role.DECODE])
async def test_outputs_are_right_and_counted_where_only_one_side_has_the_prefix(replaced: Role) -> None:
    async with cluster() as made:
        workers = {role: await made.add(role) for role in (Role.PREFILL, Role.DECODE)}
        shared = prompt_of(64)
        await made.run(request([*shared, 1]))
        await made.remove(workers[replaced])
        await made.add(replaced)
        before = received_bytes()
        asked = request([*shared, 2, 3], n=3, seed=5)
        outputs = [o async for o in made.dispatcher.generate(asked, 20)]
        tokens = {c: [t.token_id for o in outputs if o.choice == c for t in o.tokens] for c in range(3)}
        assert tokens == {c: expected_tokens(asked.token_ids, 8, seed=5, choice=c) for c in range(3)}
        num_shipped = 5 if replaced is Role.DECODE else 1
        assert received_bytes() - before == num_shipped * GEOMETRY.block_bytes
        # What the client was spared is what prefill did not compute.
        assert {o.num_cached_tokens for o in outputs if o.tokens[0].index == 0} == {64 if replaced is Role.DECODE else 0}
        await settle(made)
        for worker in made.workers:
            worker.check_baseline()


async def test_request_that_ends_at_its_first_token_finishes_without_decoding() -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL)
        decode = await made.add(Role.DECODE)
        asked = request(prompt_of(20), max_tokens=1)
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 1)
        assert decode.runner.num_steps == 0


async def test_client_that_leaves_during_prefill_frees_both_sides() -> None:
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        prefill.runner.gate.clear()
        generation = made.dispatcher.generate(request(prompt_of(100)), 20)
        first = asyncio.ensure_future(anext(generation))
        await eventually(lambda: prefill.worker.engine.load().num_running == 1)
        await generation.aclose()
        first.cancel()
        prefill.runner.gate.set()
        await settle(made)
        await eventually(prefill.is_idle)
        for worker in made.workers:
            worker.check_baseline()


async def test_full_decode_pool_makes_the_transfer_wait_and_nobody_loses() -> None:
    async with cluster() as made:
        await made.add(Role.PREFILL, 200)
        await made.add(Role.DECODE, 20)
        asked = [request(prompt_of(100, start), max_tokens=20) for start in range(6)]
        results = await asyncio.gather(*[made.run(r) for r in asked])
        for r, tokens in zip(asked, results, strict=True):
            assert tokens[0] == expected_tokens(r.token_ids, 20)
        await settle(made)
        for worker in made.workers:
            worker.check_baseline()


class TestReceiver:
    """Messages that a confused or late sender might send."""

    async def make(self, num_blocks: int = 16, lease_s: float = 5.0) -> tuple[FakeWorker, Receiver]:
        worker = FakeWorker(Role.DECODE, num_blocks)
        worker.worker.engine.start()
        pools = PoolGroup.of(worker.runner.pool)
        receiver = Receiver(worker.worker.engine, pools, worker.worker.vocab_size, BOOT, lease_s, worker.worker.streams.deliver)
        return worker, receiver

    async def test_open_for_a_transfer_nobody_expects_is_stale(self) -> None:
        worker, receiver = await self.make()
        with pytest.raises(StaleTransfer):
            await receiver.open(key_of(), geometry_of(), 2, 1)
        await worker.stop()

    @pytest.mark.parametrize("change", [{"num_layers": 3}, {"block_size": 32}, {"kv_dtype": "float16"}, {"digest": "0"}])
    async def test_incompatible_geometry_is_refused_and_named(self, change: dict[str, object]) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        with pytest.raises(IncompatiblePeer, match=next(iter(change))):
            await receiver.open(key_of(), geometry_of(**change), 2, 1)
        await worker.stop()

    async def test_a_sender_with_another_kv_cache_dtype_is_told_which_option_to_compare(self) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        with pytest.raises(IncompatiblePeer, match=r"kv_dtype is int8 at the sender and float32 here; .*--kv-cache-dtype"):
            await receiver.open(key_of(), geometry_of(kv_dtype="int8"), 2, 1)
        await worker.stop()

    async def test_wrong_block_count_is_refused(self) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        with pytest.raises(InvalidRequest, match="num_blocks"):
            await receiver.open(key_of(), geometry_of(), 3, 1)
        await worker.stop()

    @pytest.mark.parametrize(
        "change",
        [{"checksum": 1}, {"sequence_number": 1}, {"first_block": 2}, {"num_blocks": 2}, {"data": b"short"}, {"num_heads": 3}],
    )
    async def test_damaged_chunk_ends_the_attempt_and_frees_its_blocks(self, change: dict[str, object]) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        await receiver.open(key_of(), geometry_of(), 2, 1)
        if "data" in change:
            change["checksum"] = xxhash.xxh3_64_intdigest(b"short")
        with pytest.raises(CorruptTransfer):
            receiver.apply(key_of(), chunk_of(0, 0, **change))
        worker.check_baseline()
        with pytest.raises(StaleTransfer):
            receiver.apply(key_of(), chunk_of(0, 0))
        await worker.stop()

    async def test_repeated_chunk_is_refused(self) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        await receiver.open(key_of(), geometry_of(), 2, 1)
        receiver.apply(key_of(), chunk_of(0, 0))
        with pytest.raises(CorruptTransfer):
            receiver.apply(key_of(), chunk_of(0, 0))
        worker.check_baseline()
        await worker.stop()

    async def test_commit_before_all_blocks_have_come_is_refused(self) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        await receiver.open(key_of(), geometry_of(), 2, 1)
        receiver.apply(key_of(), chunk_of(0, 0))
        with pytest.raises(CorruptTransfer, match="missing"):
            receiver.commit(key_of(), kv_pb2.Commit(num_chunks=1, num_blocks=1))
        worker.check_baseline()
        await worker.stop()

    async def test_new_attempt_takes_over_and_the_old_one_is_stale(self) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        await receiver.open(key_of(0), geometry_of(), 2, 1)
        receiver.apply(key_of(0), chunk_of(0, 0))
        await receiver.open(key_of(1), geometry_of(), 2, 1)
        with pytest.raises(StaleTransfer):
            receiver.apply(key_of(0), chunk_of(1, 1))
        with pytest.raises(StaleTransfer):
            await receiver.open(key_of(0), geometry_of(), 2, 1)
        receiver.apply(key_of(1), chunk_of(0, 0, 2))
        assert receiver.abort(key_of(0)) is False
        assert receiver.abort(key_of(1)) is True
        assert receiver.abort(key_of(1)) is False
        worker.check_baseline()
        await worker.stop()

    async def test_message_for_an_earlier_boot_is_stale(self) -> None:
        worker, receiver = await self.make()
        receiver.expect(b"t" * 16, request(prompt_of(32)))
        with pytest.raises(StaleTransfer, match="boot"):
            await receiver.open(key_of(boot="older"), geometry_of(), 2, 1)
        await worker.stop()

    async def test_lease_without_progress_expires_and_commit_is_refused(self) -> None:
        worker, receiver = await self.make(lease_s=0.05)
        receiver.expect(b"t" * 16, request(prompt_of(16)))
        await receiver.open(key_of(), geometry_of(), 1, 1)
        receiver.apply(key_of(), chunk_of(0, 0))
        await eventually(lambda: worker.worker.engine.num_reserved_and_held() == (0, 0))
        with pytest.raises(StaleTransfer):
            receiver.commit(key_of(), kv_pb2.Commit(num_chunks=1, num_blocks=1))
        worker.check_baseline()
        await worker.stop()

    async def test_no_room_within_the_deadline_is_overloaded(self) -> None:
        worker, receiver = await self.make(num_blocks=7)
        receiver.expect(b"t" * 16, request(prompt_of(64)))
        receiver.expect(b"u" * 16, request(prompt_of(64, 1)))
        await receiver.open(key_of(), geometry_of(), 4, 1)
        with pytest.raises(Overloaded):
            await receiver.open(key_of(transfer=b"u" * 16), geometry_of(), 4, 0.05)
        receiver.forget(b"t" * 16)
        await receiver.open(key_of(transfer=b"u" * 16), geometry_of(), 4, 1)
        receiver.forget(b"u" * 16)
        worker.check_baseline()
        await worker.stop()
