"""Every transport keeps the handoff's promises: right bytes, both sides back to baseline, no block reused that could be written."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.decode import __main__ as decode_main
from services.prefill import __main__ as prefill_main
from services.prefill import shipment
from services.router.dispatch import metrics as leg_metrics
from shared.base.errors import (
    ConfigError,
    CorruptTransfer,
    IncompatiblePeer,
    Overloaded,
    StaleTransfer,
    TwostrokeError,
    Unavailable,
)
from shared.base.request import Token
from shared.base.worker_info import Role
from shared.engine.schedule.plan import Event
from shared.options.worker import WorkerConfig
from shared.rpc import kv_pb2
from shared.transfer.handoff import metrics
from shared.transfer.handoff.acceptors import Acceptors
from shared.transfer.handoff.links import Links
from shared.transfer.handoff.setup import make_acceptors, make_links
from shared.transfer.transports.grpc import GrpcConnector
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import Connector, LinkLost
from shared.transfer.transports.mapped.socket import listen_privately
from shared.worker.streams import Streams
from tests.support.cluster import Cluster, FakeWorker, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import GEOMETRY, expected_tokens
from tests.support.fake_transport import FakeAcceptor, FakeConnector, FakeWire, FakeWriter, Fault
from tests.support.pair import (
    PAIR_TRANSPORTS,
    Pair,
    answer,
    ask,
    config_of,
    finish,
    num_links_made,
    pair,
    random_pool,
    runner_of,
    sender_process,
    split_pool,
)

FOUR_HEADS = replace(GEOMETRY, num_kv_heads=4)
TRANSPORTS = ("grpc", "shm", "gloo")


async def add(made: Cluster, role: Role, transport: str, num_blocks: int = 64) -> FakeWorker:
    return await made.add(role, num_blocks, config=config_of(transport), runner=runner_of(role, num_blocks))


@pytest.fixture(autouse=True)
def _nothing_quarantined() -> None:
    """A receiver that stops with blocks in quarantine never gives them back."""
    metrics.quarantined_blocks.set(0)


async def check_baseline(made: Cluster) -> None:
    async with asyncio.timeout(5):
        for worker in made.workers:
            await worker.worker.streams.wait_idle()
            await eventually(worker.is_idle)
    for worker in made.workers:
        worker.check_baseline()
    assert metrics.quarantined_blocks._value.get() == 0


def received_bytes(transport: str) -> float:
    return metrics.transferred_bytes.labels("received", transport)._value.get()


# The whole path, router to decode


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestCluster:
    async def test_prompts_of_any_length_continue_with_the_right_tokens(self, transport: str) -> None:
        before = received_bytes(transport)
        async with cluster() as made:
            await add(made, Role.PREFILL, transport)
            await add(made, Role.DECODE, transport)
            for length in (1, 15, 16, 17, 33, 200):
                asked = request(prompt_of(length, length))
                assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
            await check_baseline(made)
        assert received_bytes(transport) > before

    async def test_concurrent_transfers_over_one_link_do_not_mix(self, transport: str) -> None:
        async with cluster() as made:
            await add(made, Role.PREFILL, transport, 128)
            await add(made, Role.DECODE, transport, 128)
            asked = [request(prompt_of(60 + start, start)) for start in range(10)]
            for r, tokens in zip(asked, await asyncio.gather(*[made.run(r) for r in asked]), strict=True):
                assert tokens[0] == expected_tokens(r.token_ids, 8)
            await check_baseline(made)

    async def test_cached_prefix_is_not_sent_again_and_n_outputs_share_one_transfer(self, transport: str) -> None:
        async with cluster() as made:
            await add(made, Role.PREFILL, transport)
            await add(made, Role.DECODE, transport)
            shared = prompt_of(64)
            await made.run(request([*shared, 1]))
            before = received_bytes(transport)
            asked = request([*shared, 2, 3], n=3, seed=5)
            tokens = await made.run(asked)
            assert tokens == {c: expected_tokens(asked.token_ids, 8, seed=5, choice=c) for c in range(3)}
            assert received_bytes(transport) - before == GEOMETRY.block_bytes
            await check_baseline(made)

    async def test_client_that_leaves_at_any_time_frees_both_sides_and_spares_the_others(self, transport: str) -> None:
        async with cluster() as made:
            prefill = await add(made, Role.PREFILL, transport, 256)
            decode = await add(made, Role.DECODE, transport, 256)
            for num_steps in range(1, 5):
                leaving = [made.dispatcher.generate(request(prompt_of(200, 10 * num_steps + i)), 20) for i in range(3)]
                tasks = [asyncio.ensure_future(anext(generation)) for generation in leaving]
                staying = request(prompt_of(150, num_steps))
                running = asyncio.create_task(made.run(staying))
                await until_steps(prefill, num_steps, tasks)
                for task, generation in zip(tasks, leaving, strict=True):
                    task.cancel()
                    await generation.aclose()
                assert (await running)[0] == expected_tokens(staying.token_ids, 8)
                await asyncio.gather(*tasks, return_exceptions=True)
            await check_baseline(made)
            assert decode.worker.engine.num_reserved_and_held() == (0, 0)

    async def test_receiver_that_is_replaced_is_linked_to_anew(self, transport: str) -> None:
        async with cluster() as made:
            await add(made, Role.PREFILL, transport)
            first = await add(made, Role.DECODE, transport)
            asked = request(prompt_of(70))
            assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
            await made.remove(first)
            await add(made, Role.DECODE, transport)
            again = request(prompt_of(70, 3))
            assert (await made.run(again))[0] == expected_tokens(again.token_ids, 8)
            await check_baseline(made)

    async def test_sender_that_is_replaced_is_linked_to_anew(self, transport: str) -> None:
        async with cluster() as made:
            first = await add(made, Role.PREFILL, transport)
            await add(made, Role.DECODE, transport)
            assert await made.run(request(prompt_of(70)))
            await made.remove(first)
            await add(made, Role.PREFILL, transport)
            again = request(prompt_of(70, 3))
            assert (await made.run(again))[0] == expected_tokens(again.token_ids, 8)
            await check_baseline(made)


async def until_steps(worker: FakeWorker, num_steps: int, tasks: list[asyncio.Future[object]]) -> None:
    """So many steps from now, or until there is nothing left to compute."""
    target = worker.runner.num_steps + num_steps
    await eventually(lambda: worker.runner.num_steps >= target or all(task.done() for task in tasks))


# One sender and one receiver


@pytest.mark.parametrize("transport", PAIR_TRANSPORTS)
class TestPair:
    async def test_blocks_arrive_bit_for_bit_in_several_pushes(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(200)
            sender = both.sender()
            assert await sender.open(13) == 0
            blocks = both.reserved_blocks()
            await sender.push(0, list(range(20, 25)))
            await finish(sender, 5, list(range(3, 11)))
            assert sender.transport == transport
            assert torch.equal(both.worker.runner.pool.blocks[blocks], both.pool.blocks[[*range(20, 25), *range(3, 11)]])
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    async def test_blocks_larger_than_a_chunk_go_layer_by_layer(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(100)
            sender = both.sender()
            await sender.open(7)
            blocks = both.reserved_blocks()
            sender._max_chunk_bytes = GEOMETRY.block_bytes // GEOMETRY.num_layers
            await finish(sender, 0, list(range(20, 27)))
            assert sender._num_chunks == 7 * GEOMETRY.num_layers
            assert torch.equal(both.worker.runner.pool.blocks[blocks], both.pool.blocks[20:27])
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    @pytest.mark.parametrize("phase", ["opened", "pushed"])
    async def test_abort_in_any_phase_gives_all_back_and_the_link_is_used_again(self, transport: str, phase: str) -> None:
        async with pair(transport) as both:
            for attempt in range(3):
                transfer_id = bytes([attempt]) * 16
                both.expect(100, transfer_id)
                sender = both.sender(0, transfer_id)
                await sender.open(7)
                if phase == "pushed":
                    await sender.push(0, [1, 2, 3])
                await sender.abort("test")
                await sender.abort("test")
                await both.is_baseline()
                both.receiver.forget(transfer_id)
            assert num_links_made() == both.num_links_before + 1

    async def test_cancelled_push_stops_reading_and_writing(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(400)
            sender = both.sender()
            await sender.open(25)
            push = asyncio.create_task(sender.push(0, list(range(1, 26))))
            await asyncio.sleep(0)
            push.cancel()
            with suppress(asyncio.CancelledError):
                await push
            await sender.abort("test")
            await both.is_baseline()

    async def test_broken_stream_frees_its_blocks_at_once(self, transport: str) -> None:
        async with pair(transport, lease_s=60.0) as both:
            both.expect(100)
            sender = both.sender()
            await sender.open(7)
            await sender.push(0, [1, 2])
            await eventually(lambda: both.num_missing() == 5)
            sender._call.cancel()
            await both.is_baseline()
            await sender.abort("test")

    async def test_expired_attempt_is_refused_and_the_next_one_succeeds(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(100)
            late = both.sender(0)
            await late.open(7)
            await late.push(0, [1, 2])
            await eventually(lambda: both.num_missing() == 5)
            both.expire()
            await both.is_baseline()
            with pytest.raises(TwostrokeError):  # not always StaleTransfer: gRPC may lose the reason when a write fails
                await finish(late, 2, [3])
            await late.abort("test")
            await self.complete(both, attempt=1)

    async def test_second_attempt_takes_over_from_the_first(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(100)
            first = both.sender(0)
            await first.open(7)
            await first.push(0, [1, 2])
            await self.complete(both, attempt=1)
            with pytest.raises(TwostrokeError):
                await finish(first, 2, [3])
            await first.abort("test")

    async def complete(self, both: Pair, attempt: int) -> None:
        sender = both.sender(attempt)
        await sender.open(7)
        blocks = both.reserved_blocks()
        await finish(sender, 0, list(range(30, 37)))
        assert torch.equal(both.worker.runner.pool.blocks[blocks], both.pool.blocks[30:37])
        both.receiver.forget(b"t" * 16)
        await both.is_baseline()

    async def test_a_dead_link_is_replaced_at_the_next_open(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(100)
            sender = both.sender(0)
            await sender.open(7)
            assert sender._link is not None
            sender._link.discard()
            await sender.abort("test")
            await both.is_baseline()
            await self.complete(both, attempt=1)
            num_dead = 0 if transport == "grpc" else 1  # whose link is the channel, which heals by itself
            assert num_links_made() == both.num_links_before + 1 + num_dead

    async def test_receiver_that_is_gone_is_a_definite_error(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(100)
            sender = both.sender()
            await sender.open(7)
            await both.receiver.acceptors.close()
            await both.worker._server.stop(0)
            with pytest.raises(TwostrokeError):
                await finish(sender, 0, [1, 2, 3])
            await sender.abort("test")
            with pytest.raises(TwostrokeError):
                await both.sender(1).open(7)
            both.receiver.forget(b"t" * 16)

    async def test_receiver_that_is_gone_is_told_to_all_who_wait_even_if_one_is_cancelled(self, transport: str) -> None:
        async with pair(transport) as both:
            both.expect(100)
            sender = both.sender()
            await sender.open(7)
            waiting = asyncio.create_task(sender._raise_status())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await both.receiver.acceptors.close()
            await both.worker._server.stop(0)
            with pytest.raises(TwostrokeError):
                await sender._raise_status()
            await sender.abort("test")
            both.receiver.forget(b"t" * 16)

    @pytest.mark.parametrize("split", [(1, 3), (3, 1), (2, 1, 1), (4,)])
    @pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
    async def test_heads_of_an_unequally_split_sender_are_put_together(
        self, transport: str, split: tuple[int, ...], kv_dtype: str
    ) -> None:
        async with pair(transport, geometry=replace(FOUR_HEADS, kv_dtype=kv_dtype)) as both:
            both.expect(100)
            shards, whole = split_pool(both.pool, split)
            sender = both.sender(shards=shards)
            await sender.open(7)
            blocks = both.reserved_blocks()
            await finish(sender, 0, list(range(40, 47)))
            assert torch.equal(both.worker.runner.pool.blocks[blocks], whole[40:47])
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    async def test_half_of_the_heads_is_not_a_complete_block(self, transport: str) -> None:
        async with pair(transport, geometry=FOUR_HEADS) as both:
            both.expect(100)
            shards, _ = split_pool(both.pool, (1, 3))
            sender = both.sender(shards=shards)
            await sender.open(7)
            sender._shards = shards[:1]
            await sender.push(0, list(range(40, 47)))
            with pytest.raises(CorruptTransfer, match="7 blocks missing"):
                await sender.commit([Token(0, 7)], 0)
            await sender.abort("test")
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()


# Shared memory: who may write, and until when


class TestFence:
    async def test_blocks_go_back_only_after_the_writer_is_closed(self) -> None:
        async with pair("shm") as both:
            both.expect(100)
            sender = both.sender()
            await sender.open(7)
            writer = sender._writer
            assert writer is not None
            closed_when_given_back: list[bool] = []
            give_back = both.receiver._give_back

            def spy(expected: object) -> None:
                closed_when_given_back.append(writer.is_closed)  # type: ignore[attr-defined]
                give_back(expected)  # type: ignore[arg-type]

            both.receiver._give_back = spy  # type: ignore[method-assign]
            both.expire()
            await both.is_baseline()
            assert closed_when_given_back == [True]
            with pytest.raises(StaleTransfer):
                await sender.push(0, [1])
            await sender.abort("test")

    async def test_quarantine_outlives_the_stream_and_ends_with_the_answer(self) -> None:
        wire = FakeWire()
        async with pair("grpc", wire) as both:
            both.expect(100)
            await both.sender().open(7)
            wire.may_answer.clear()
            both.receiver.forget(b"t" * 16)
            assert both.num_reserved() == 1
            assert metrics.quarantined_blocks._value.get() == 7
            wire.may_answer.set()
            await both.is_baseline()

    async def test_next_attempt_waits_for_the_fence_and_gives_up_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shared.transfer.handoff.receiver._FENCE_TIMEOUT_S", 0.1)
        wire = FakeWire()
        async with pair("grpc", wire) as both:
            both.expect(100)
            await both.sender(0).open(7)
            wire.may_answer.clear()
            with pytest.raises(Overloaded, match="stopped writing"):
                await both.sender(1).open(7)
            waiting = asyncio.create_task(both.sender(2).open(7))
            wire.may_answer.set()
            assert await waiting == 0
            both.receiver.forget(b"t" * 16)
            await both.is_baseline()

    async def test_stopped_sender_keeps_its_blocks_and_nobody_elses_until_it_answers_or_dies(self) -> None:
        async with pair("shm") as both, sender_process(both, "shm") as process:
            for end in (signal.SIGCONT, signal.SIGKILL):
                transfer_id = bytes([end]) * 16
                both.expect(100, transfer_id)
                assert await ask(process, f"open {transfer_id.hex()} 7") == "cached 0"
                blocks = both.reserved_blocks(transfer_id)
                assert await ask(process, "push 0 4") == "pushed by shm"
                assert bool((both.worker.runner.pool.kv[blocks[:4]] == 1.0).all())
                assert await ask(process, "storm") == "storming"
                os.kill(process.pid, signal.SIGSTOP)
                both.expire(transfer_id)
                await eventually(lambda: metrics.quarantined_blocks._value.get() == 7)
                both.receiver.forget(transfer_id)
                assert both.num_reserved() == 1
                await self.transfer_beside(both, bytes([end + 1]) * 16)
                os.kill(process.pid, end)
                await both.is_baseline()
                both.worker.runner.pool.kv[blocks] = 2.0
                if end == signal.SIGCONT:
                    assert (await answer(process)).endswith("by StaleTransfer")
                assert bool((both.worker.runner.pool.kv[blocks] == 2.0).all())

    async def transfer_beside(self, both: Pair, other: bytes) -> None:
        both.expect(100, other)
        sender = both.sender(0, other)
        await sender.open(7)
        await finish(sender, 0, list(range(1, 8)))
        both.receiver.forget(other)

    async def test_sender_killed_while_it_writes_frees_at_once(self) -> None:
        async with pair("shm", lease_s=60.0) as both, sender_process(both, "shm") as process:
            both.expect(100)
            await ask(process, f"open {(b't' * 16).hex()} 7")
            await ask(process, "storm")
            process.kill()
            await both.is_baseline()

    async def test_killed_sender_takes_its_communicator_with_it(self) -> None:
        async with pair("gloo", lease_s=60.0) as both, sender_process(both, "gloo") as process:
            both.expect(100)
            await ask(process, f"open {(b't' * 16).hex()} 7")
            process.kill()
            await both.is_baseline()

    async def test_receivers_end_unmaps_its_pool_at_the_sender(self) -> None:
        async with pair("shm") as both:
            both.expect(100)
            sender = both.sender()
            await sender.open(7)
            num_mappings = num_pool_mappings()
            await both.receiver.acceptors.close()
            await eventually(lambda: num_pool_mappings() == num_mappings - 1)
            with pytest.raises(Unavailable):
                await sender.push(0, [1])
            await sender.abort("test")
            both.receiver.forget(b"t" * 16)

    async def test_nothing_is_left_in_the_file_system(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        killed, _ = listen_privately()
        killed.close()  # as the kernel does it, without removing the folder
        async with pair("shm") as both:
            assert permissions_of_entries(tmp_path) == [0o700]
            both.expect(20)
            await both.sender().open(2)
        assert permissions_of_entries(tmp_path) == []


def permissions_of_entries(folder: Path) -> list[int]:
    return [entry.stat().st_mode & 0o777 for entry in folder.iterdir()]


@pytest.mark.parametrize("transport", ["shm", "cuda-ipc"])
@pytest.mark.parametrize(
    ("lie", "says"),
    [
        ([0, 1, 2, 3, 4, 5, 64], "grants block 64 of pools of 64 blocks"),
        ([2**32 - 1] * 7, "grants block 4294967295 of pools of 64 blocks"),
        ([0, 1, 2, 3, 4, 5], "granted 6 of the 7 blocks from 0 on"),
        ([], "granted 0 of the 7 blocks from 0 on"),
    ],
)
async def test_nothing_is_written_for_a_receiver_that_lies_about_its_blocks(
    transport: str, lie: list[int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(transport) as both:
        honest = both.receiver.open

        async def lies(*args: Any, **kwargs: Any) -> kv_pb2.OpenReply:
            reply = await honest(*args, **kwargs)
            del reply.block_ids[:]
            reply.block_ids.extend(lie)
            return reply

        monkeypatch.setattr(both.receiver, "open", lies)
        before = both.worker.runner.pool.blocks.clone()
        both.expect(100)
        sender = both.sender()

        async def ship() -> None:
            await sender.open(7)
            await sender.push(0, list(range(20, 27)))

        with pytest.raises(CorruptTransfer, match=says):
            await ship()
        await sender.abort("test")
        assert torch.equal(both.worker.runner.pool.blocks, before)
        await both.is_baseline()


def num_pool_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:twostroke-kv")


# Faults of the wire


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.DUPLICATE, Fault.REORDER, Fault.CORRUPT_HEADER, Fault.DIE])
async def test_faulty_chunk_ends_the_attempt_and_the_next_one_succeeds(fault: Fault) -> None:
    wire = FakeWire()
    async with pair("grpc", wire) as both:
        both.expect(200)
        sender = both.sender(0)
        await sender.open(13)
        wire.faults = {1: fault}
        with pytest.raises(TwostrokeError):
            await finish(sender, 0, list(range(1, 14)), num_blocks_each=4)
        await sender.abort("test")
        await both.is_baseline()
        again = both.sender(1)
        await again.open(13)
        blocks = both.reserved_blocks()
        await finish(again, 0, list(range(1, 14)))
        assert torch.equal(both.worker.runner.pool.blocks[blocks], both.pool.blocks[1:14])
        both.receiver.forget(b"t" * 16)
        await both.is_baseline()


async def test_delayed_sender_finds_its_attempt_expired() -> None:
    wire = FakeWire()
    async with pair("grpc", wire) as both:
        both.expect(100)
        sender = both.sender()
        await sender.open(7)
        wire.may_write.clear()
        push = asyncio.create_task(sender.push(0, [1, 2]))
        await eventually(lambda: sender._shipping is not None)
        both.expire()
        await both.is_baseline()
        wire.may_write.set()
        with pytest.raises(StaleTransfer):
            await push
        await sender.abort("test")


async def test_an_abort_waits_for_the_chunk_under_way_and_bars_the_writer_after_it() -> None:
    wire = FakeWire()
    async with pair("grpc", wire) as both:
        both.expect(100)
        sender = both.sender()
        await sender.open(7)
        wire.may_write.clear()
        push = asyncio.create_task(sender.push(0, [1, 2]))
        await eventually(lambda: sender._shipping is not None)
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)
        aborting = asyncio.create_task(sender.abort("test"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert isinstance(sender._writer, FakeWriter)
        assert not sender._writer.is_closed  # a block that is being read is read to its end
        assert both.num_reserved() == 1
        wire.may_write.set()
        await aborting
        assert sender._shipping is not None
        assert sender._shipping.done()
        await both.is_baseline()


async def test_a_link_that_the_receiver_does_not_know_any_more_is_made_anew_by_the_next_attempt() -> None:
    wire = FakeWire()
    async with pair("grpc", wire) as both:
        both.expect(100)
        first = both.sender(0)
        await first.open(7)
        await first.abort("test")
        wire.link = None  # as a receiver forgets it
        with pytest.raises(Unavailable, match="fake link is gone"):
            await both.sender(1).open(7)
        assert await both.sender(2).open(7) == 0
        both.receiver.forget(b"t" * 16)
        await both.is_baseline()


async def test_a_client_that_leaves_during_a_blocked_send_frees_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.handoff.sender._ABORT_TIMEOUT_S", 0.05)
    wire = FakeWire()
    monkeypatch.setattr(
        decode_main, "make_acceptors", lambda config, pools, boot_id, name: Acceptors([FakeAcceptor(wire, pools.shards[0].pool)])
    )
    monkeypatch.setattr(prefill_main, "make_links", lambda config, pool, host_name: Links([FakeConnector(wire)]))
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL)
        decode = await made.add(Role.DECODE)
        wire.may_write.clear()  # and it stays so: nobody takes the blocks
        generation = made.dispatcher.generate(request(prompt_of(200)), 20)
        first = asyncio.ensure_future(anext(generation))
        await eventually(lambda: prefill.worker.engine.num_reserved_and_held()[1] == 1)
        assert decode.worker.engine.num_reserved_and_held()[0] == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await generation.aclose()
        await check_baseline(made)
        wire.may_write.set()
        asked = request(prompt_of(200))
        assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
        await check_baseline(made)


async def test_every_prefill_of_a_dying_link_ends_in_the_right_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = FakeWire()
    monkeypatch.setattr(
        decode_main,
        "make_acceptors",
        lambda config, pools, boot_id, host_name: Acceptors([FakeAcceptor(wire, pools.shards[0].pool)]),
    )
    monkeypatch.setattr(prefill_main, "make_links", lambda config, pool, host_name: Links([FakeConnector(wire)]))
    async with cluster() as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        for fault in Fault:
            wire.faults = {1: fault}
            asked = request(prompt_of(200, fault.value))
            assert (await made.run(asked))[0] == expected_tokens(asked.token_ids, 8)
        await check_baseline(made)


async def test_time_to_push_the_last_blocks_counts_as_transfer_not_as_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, clock_s = FakeWire(), 0.0
    monkeypatch.setattr(
        decode_main, "make_acceptors", lambda config, pools, boot_id, name: Acceptors([FakeAcceptor(wire, pools.shards[0].pool)])
    )
    monkeypatch.setattr(prefill_main, "make_links", lambda config, pool, host_name: Links([FakeConnector(wire)]))
    monkeypatch.setattr(shipment, "time", SimpleNamespace(monotonic=lambda: clock_s))
    before = {stage: leg_metrics.prefill_seconds.labels(stage)._sum.get() for stage in ("compute", "transfer")}
    async with cluster() as made:
        prefill = await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        wire.may_write.clear()
        computed = asyncio.Event()
        engine, streams = prefill.worker.engine, prefill.worker.streams

        def deliver(events: Sequence[Event]) -> None:
            Streams.deliver(streams, events)
            if engine.num_reserved_and_held() == (0, 1):
                computed.set()

        monkeypatch.setattr(streams, "deliver", deliver)
        asked = request(prompt_of(200))
        running = asyncio.create_task(made.run(asked))
        await computed.wait()
        clock_s = 100.0
        wire.may_write.set()
        assert (await running)[0] == expected_tokens(asked.token_ids, 8)
        await check_baseline(made)
    took = {stage: leg_metrics.prefill_seconds.labels(stage)._sum.get() - before[stage] for stage in before}
    assert took == {"compute": 0.0, "transfer": 100.0}


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestLayers:
    """Layers of a chunk go out while the next ones are computed."""

    @pytest.fixture(autouse=True)
    def _every_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shared.engine.compute.layer_progress._INTERVAL_S", 0.0)
        monkeypatch.setattr(shipment, "_LEAST_EARLY_BYTES", 0)

    @pytest.mark.parametrize("length", [33, 64, 150])
    async def test_a_layer_arrives_before_the_next_is_computed(self, transport: str, length: int) -> None:
        async with cluster() as made:
            prefill = await add(made, Role.PREFILL, transport)
            await add(made, Role.DECODE, transport)
            before = received_bytes(transport)
            prefill.runner.layer_gate.clear()
            asked = request(prompt_of(length))
            running = asyncio.create_task(made.run(asked))
            num_blocks = -(-length // 16) if length <= 64 else 4  # of the first step, of 64 tokens
            layer_bytes = GEOMETRY.block_bytes // GEOMETRY.num_layers
            await eventually(lambda: received_bytes(transport) - before == num_blocks * layer_bytes)
            prefill.runner.layer_gate.set()
            assert (await running)[0] == expected_tokens(asked.token_ids, 8)
            await check_baseline(made)

    async def test_a_prompt_whose_step_fails_after_a_layer_was_sent_is_served_all_the_same(self, transport: str) -> None:
        async with cluster() as made:
            prefill = await add(made, Role.PREFILL, transport)
            await add(made, Role.DECODE, transport)
            before = received_bytes(transport)
            prefill.runner.layer_gate.clear()
            prefill.runner.fail_after_layer = ValueError("the device is on fire")
            asked = request(prompt_of(60))
            running = asyncio.create_task(made.run(asked))
            await eventually(lambda: received_bytes(transport) > before)
            prefill.runner.layer_gate.set()
            assert (await running)[0] == expected_tokens(asked.token_ids, 8)
            await check_baseline(made)

    async def test_layers_of_many_prompts_in_one_step_do_not_mix_and_cached_ones_are_not_sent(self, transport: str) -> None:
        async with cluster() as made:
            await add(made, Role.PREFILL, transport, 128)
            await add(made, Role.DECODE, transport, 128)
            shared = prompt_of(64)
            await made.run(request([*shared, 1]))
            before = received_bytes(transport)
            asked = [request([*shared, *prompt_of(20, start)], n=2, seed=start) for start in range(8)]
            for r, tokens in zip(asked, await asyncio.gather(*[made.run(r) for r in asked]), strict=True):
                seed = r.sampling.seed
                assert tokens == {c: expected_tokens(r.token_ids, 8, seed=seed, choice=c) for c in range(2)}
            assert received_bytes(transport) - before == 8 * 2 * GEOMETRY.block_bytes
            await check_baseline(made)


async def test_blocks_in_prefills_own_cache_go_out_before_anything_is_computed() -> None:
    async with cluster() as made:
        prefill = await add(made, Role.PREFILL, "shm")
        first = await add(made, Role.DECODE, "shm")
        shared = prompt_of(160)
        await made.run(request([*shared, 1]))
        await made.remove(first)  # who held them too
        await add(made, Role.DECODE, "shm")
        before = received_bytes("shm")
        prefill.runner.gate.clear()
        asked = request([*shared, 2, 3])
        running = asyncio.create_task(made.run(asked))
        await eventually(lambda: received_bytes("shm") - before == 10 * GEOMETRY.block_bytes)
        prefill.runner.gate.set()
        assert (await running)[0] == expected_tokens(asked.token_ids, 8)
        await check_baseline(made)


# Choice


class Unreachable:
    """A transport that looks possible and is not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_tries = 0

    async def connect(self, peer: object, offer: object) -> object:
        self.num_tries += 1
        raise LinkLost("no way there")


class TestChoice:
    async def test_best_common_transport_is_taken_and_shown(self) -> None:
        async with cluster() as made:
            prefill = await add(made, Role.PREFILL, "auto")
            decode = await add(made, Role.DECODE, "auto")
            assert prefill.info().transports == ("shm", "gloo", "grpc")
            assert decode.info().transports == ("shm", "gloo", "grpc")
            before = received_bytes("shm")
            await made.run(request(prompt_of(40)))
            assert received_bytes("shm") - before == 3 * GEOMETRY.block_bytes

    async def test_private_pool_is_not_offered_and_network_serves(self) -> None:
        async with cluster() as made:
            await add(made, Role.PREFILL, "auto")
            decode = await made.add(Role.DECODE, config=config_of("auto"))
            assert decode.info().transports == ("gloo", "grpc")
            before = received_bytes("gloo")
            await made.run(request(prompt_of(40)))
            assert received_bytes("gloo") > before

    async def test_transport_that_does_not_work_gives_way_to_the_next_and_is_not_tried_each_time(self) -> None:
        async with pair("auto") as both:
            broken = Unreachable("shm")
            connectors: list[Connector] = [broken, GrpcConnector()]  # type: ignore[list-item]
            both.links = Links(connectors)
            for number in range(3):
                transfer_id = bytes([number]) * 16
                both.expect(20, transfer_id)
                sender = both.sender(0, transfer_id)
                await sender.open(2)
                assert sender.transport == "grpc"
                await sender.abort("test")
            assert broken.num_tries == 1

    async def test_forced_transport_that_the_other_side_lacks_is_refused_by_name(self) -> None:
        async with pair("grpc") as both:
            both.links = make_links(config_of("gloo"), both.pool, lambda: "127.0.0.1")
            both.expect(20)
            with pytest.raises(IncompatiblePeer, match="offers grpc; this worker is told to use gloo"):
                await both.sender().open(2)

    def test_transport_that_this_worker_cannot_do_ends_it_with_one_line(self) -> None:
        with pytest.raises(ConfigError, match="--transport is nccl, but this worker can only do"):
            make_links(config_of("nccl"), random_pool(GEOMETRY, 1), lambda: "")
        with pytest.raises(ConfigError, match="--transport is shm"):
            make_acceptors(config_of("shm"), PoolGroup.of(random_pool(GEOMETRY, 1)), "boot", lambda: "")

    def test_with_tls_nothing_is_sent_in_the_clear_unasked(self) -> None:
        config = WorkerConfig(tls_cert="cert", tls_key="key", tls_ca="ca")
        assert make_links(config, random_pool(GEOMETRY, 1), lambda: "").transports == ("shm", "grpc")
