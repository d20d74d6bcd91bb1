"""The life of a reservation: what keeps it, what ends it, who is woken, and what a commit may claim."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.base.errors import CorruptTransfer, IncompatiblePeer, StaleTransfer, Unavailable
from shared.base.request import Output
from shared.base.worker_info import Role
from shared.rpc import request_pb2
from shared.transfer.handoff.acceptors import Acceptors
from shared.transfer.handoff.receiver import Receiver
from shared.transfer.transports.grpc import GrpcAcceptor
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import GRPC, Route
from tests.support.cluster import FakeWorker, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import VOCAB_SIZE
from tests.support.fake_transport import FakeAcceptor, FakeWire
from tests.support.messages import BOOT, chunk_of, commit_of, geometry_of, key_of

FIRST, SECOND = b"t" * 16, b"u" * 16


@asynccontextmanager
async def receiving(num_blocks: int = 16, lease_s: float = 5.0) -> AsyncIterator[tuple[FakeWorker, Receiver, list[Output]]]:
    """A receiver that offers gRPC and a transport to which no link was made, and the outputs that it delivers."""
    worker, outputs = FakeWorker(Role.DECODE, num_blocks), list[Output]()
    made = worker.worker
    made.engine.start()
    acceptors = Acceptors([GrpcAcceptor(), FakeAcceptor(FakeWire(), made.pool)])
    receiver = Receiver(made.engine, PoolGroup.of(made.pool), made.vocab_size, BOOT, lease_s, outputs.extend, acceptors)
    yield worker, receiver, outputs
    await eventually(worker.is_idle)
    worker.check_baseline()
    await worker.stop()


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], object]:
    """Moves the loop's clock, and lets what became due run."""
    loop = asyncio.get_running_loop()
    real, moved_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + moved_s)

    async def advance(seconds: float) -> None:
        nonlocal moved_s
        moved_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    return advance


class TestLease:
    async def test_each_chunk_renews_it(self, advance, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
        async with receiving(lease_s=0.2) as (_, receiver, outputs):
            receiver.expect(FIRST, request(prompt_of(96), max_tokens=1))
            await receiver.open(key_of(), geometry_of(), 6, 1)
            for number in range(6):
                await advance(0.15)
                receiver.apply(key_of(), chunk_of(number, number))
            receiver.commit(key_of(), commit_of(6, 6))
            await advance(10.0)
            assert [t.token_id for o in outputs for t in o.tokens] == [7]
            assert not [r for r in caplog.records if "no progress" in r.getMessage()]
            receiver.forget(FIRST)

    async def test_without_a_chunk_it_ends_in_time_and_once(self, advance, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
        caplog.set_level(logging.WARNING)
        async with receiving(lease_s=0.2) as (worker, receiver, _):
            receiver.expect(FIRST, request(prompt_of(32)))
            await receiver.open(key_of(), geometry_of(), 2, 1)
            await advance(0.15)
            assert worker.worker.engine.num_reserved_and_held() == (1, 0)
            await advance(0.1)
            assert sum("no progress" in r.getMessage() for r in caplog.records) == 1
            with pytest.raises(StaleTransfer):
                receiver.apply(key_of(), chunk_of(0, 0))


class TestRoom:
    async def test_an_aborted_reservation_wakes_who_waits_without_an_engine_step(self) -> None:
        async with receiving(num_blocks=7) as (worker, receiver, _):
            receiver.expect(FIRST, request(prompt_of(64)))
            receiver.expect(SECOND, request(prompt_of(64, 1)))
            await receiver.open(key_of(), geometry_of(), 4, 5)
            waiting = asyncio.create_task(receiver.open(key_of(transfer=SECOND), geometry_of(), 4, 5))
            await eventually(lambda: receiver._expected[SECOND].num_waiting == 1)
            assert receiver.abort(key_of())
            async with asyncio.timeout(2):
                assert (await waiting).num_cached_blocks == 0
            assert worker.runner.num_steps == 0
            receiver.forget(FIRST)
            receiver.forget(SECOND)

    async def test_a_landing_that_fails_gives_its_blocks_to_who_waits(self) -> None:
        async with receiving(num_blocks=7) as (_, receiver, _):
            receiver.expect(FIRST, request(prompt_of(64)))
            receiver.expect(SECOND, request(prompt_of(64, 1)))
            with pytest.raises(Unavailable, match="fake link is gone"):
                await receiver.open(key_of(), geometry_of(), 4, 5, Route("fake", b"l" * 16, 1))
            async with asyncio.timeout(2):
                await receiver.open(key_of(transfer=SECOND), geometry_of(), 4, 5)
            receiver.forget(SECOND)
            await receiver.open(key_of(), geometry_of(), 4, 5)
            receiver.forget(FIRST)

    @pytest.mark.parametrize("leave", ["cancelled", "forgotten"])
    async def test_who_leaves_the_queue_is_not_served_and_the_next_is(self, leave: str) -> None:
        third = b"v" * 16
        async with receiving(num_blocks=7) as (worker, receiver, _):
            for number, transfer in enumerate((FIRST, SECOND, third)):
                receiver.expect(transfer, request(prompt_of(64, number)))
            await receiver.open(key_of(), geometry_of(), 4, 5)
            leaving = asyncio.create_task(receiver.open(key_of(transfer=SECOND), geometry_of(), 4, 5))
            await eventually(lambda: receiver._expected[SECOND].num_waiting == 1)
            staying = asyncio.create_task(receiver.open(key_of(transfer=third), geometry_of(), 4, 5))
            await eventually(lambda: receiver._expected[third].num_waiting == 1)
            if leave == "cancelled":
                leaving.cancel()
            else:
                receiver.forget(SECOND)
            with pytest.raises((asyncio.CancelledError, StaleTransfer)):
                await leaving
            receiver.forget(FIRST)
            async with asyncio.timeout(2):
                await staying
            receiver.forget(third)
            receiver.forget(SECOND)
            assert worker.runner.num_steps == 0


class TestAttempts:
    async def test_the_same_attempt_may_open_again_but_not_by_another_route(self) -> None:
        async with receiving() as (worker, receiver, _):
            receiver.expect(FIRST, request(prompt_of(32)))
            once = await receiver.open(key_of(), geometry_of(), 2, 1)
            assert await receiver.open(key_of(), geometry_of(), 2, 1) == once
            assert worker.worker.engine.num_reserved_and_held() == (1, 0)
            with pytest.raises(StaleTransfer, match="another link"):
                await receiver.open(key_of(), geometry_of(), 2, 1, Route(GRPC, b"x" * 16))
            receiver.apply(key_of(), chunk_of(0, 0))  # the first one goes on
            receiver.forget(FIRST)

    async def test_a_transport_that_is_not_offered_is_refused_before_anything_is_reserved(self) -> None:
        async with receiving() as (worker, receiver, _):
            receiver.expect(FIRST, request(prompt_of(32)))
            with pytest.raises(IncompatiblePeer, match="transport is 'pigeon'; this worker offers grpc, fake"):
                await receiver.open(key_of(), geometry_of(), 2, 1, Route("pigeon"))
            worker.check_baseline()
            receiver.forget(FIRST)

    async def test_a_second_commit_is_stale_and_gives_no_second_token(self) -> None:
        async with receiving() as (_, receiver, outputs):
            receiver.expect(FIRST, request(prompt_of(16), max_tokens=1))
            await receiver.open(key_of(), geometry_of(), 1, 1)
            receiver.apply(key_of(), chunk_of(0, 0))
            receiver.commit(key_of(), commit_of(1))
            for attempt in (0, 1):
                with pytest.raises(StaleTransfer):
                    receiver.commit(key_of(attempt), commit_of(1))
                with pytest.raises(StaleTransfer):
                    await receiver.open(key_of(attempt), geometry_of(), 1, 1)
            assert len(outputs) == 1
            assert receiver.abort(key_of()) is False
            receiver.forget(FIRST)


def token(**changes: object) -> request_pb2.Token:
    fields: dict[str, object] = {"index": 0, "token_id": 7}
    return request_pb2.Token(**(fields | changes))  # type: ignore[arg-type]


def top(*values: float, token_id: int = 1) -> list[request_pb2.TokenLogprob]:
    return [request_pb2.TokenLogprob(token_id=token_id, logprob=value) for value in values]


class TestCommit:
    """What a commit says is checked: a token outside the vocabulary would fail everybody's next step."""

    @pytest.mark.parametrize(
        ("change", "sampling"),
        [
            ({"first_tokens": [token(token_id=VOCAB_SIZE)]}, {}),
            ({"first_tokens": [token(token_id=2**32 - 1)]}, {}),
            ({"first_tokens": [token(index=1)]}, {}),
            ({"first_tokens": []}, {}),
            ({"first_tokens": [token(), token()]}, {}),
            ({"first_tokens": [token(), token()]}, {"n": 3}),
            ({"first_tokens": [token(), token(token_id=VOCAB_SIZE)]}, {"n": 2}),
            ({"first_tokens": [token(logprob=-1.0)]}, {}),
            ({"first_tokens": [token(top_logprobs=top(-1.0))]}, {}),
            ({"first_tokens": [token()]}, {"num_logprobs": 0}),
            ({"first_tokens": [token(logprob=math.nan)]}, {"num_logprobs": 0}),
            ({"first_tokens": [token(logprob=-math.inf)]}, {"num_logprobs": 0}),
            ({"first_tokens": [token(logprob=-1.0, top_logprobs=top(math.nan))]}, {"num_logprobs": 1}),
            ({"first_tokens": [token(logprob=-1.0, top_logprobs=top(-1.0, -2.0))]}, {"num_logprobs": 1}),
            ({"first_tokens": [token(logprob=-1.0, top_logprobs=top(-1.0, token_id=VOCAB_SIZE))]}, {"num_logprobs": 1}),
            ({"num_chunks": 0}, {}),
            ({"num_chunks": 2**32 - 1}, {}),
            ({"num_blocks": 0}, {}),
            ({"num_blocks": 2}, {}),
            ({"num_cached_tokens": 17}, {}),
        ],
    )
    async def test_what_does_not_fit_ends_the_attempt_and_the_next_one_commits(
        self, change: dict[str, object], sampling: dict[str, object]
    ) -> None:
        async with receiving() as (worker, receiver, outputs):
            receiver.expect(FIRST, request(prompt_of(16), max_tokens=1, **sampling))
            receiver.expect(SECOND, request(prompt_of(16, 1), max_tokens=1))
            await receiver.open(key_of(), geometry_of(), 1, 1)
            await receiver.open(key_of(transfer=SECOND), geometry_of(), 1, 1)
            receiver.apply(key_of(), chunk_of(0, 0))
            with pytest.raises(CorruptTransfer):
                receiver.commit(key_of(), commit_of(1, **change))
            assert not outputs
            await eventually(lambda: worker.worker.engine.num_reserved_and_held() == (1, 0))
            receiver.apply(key_of(transfer=SECOND), chunk_of(0, 0))  # nobody else's transfer was touched
            receiver.commit(key_of(transfer=SECOND), commit_of(1))
            await receiver.open(key_of(1), geometry_of(), 1, 1)
            receiver.apply(key_of(1), chunk_of(0, 0))
            right = token(logprob=-1.0, top_logprobs=top(-1.0)) if sampling.get("num_logprobs") else token()
            if sampling.get("num_logprobs") == 0:
                right = token(logprob=-1.0)
            receiver.commit(key_of(1), commit_of(1, first_tokens=[right] * int(str(sampling.get("n", 1)))))
            assert {t.token_id for o in outputs for t in o.tokens} == {7}
            receiver.forget(FIRST)
            receiver.forget(SECOND)

    async def test_bounds_are_inclusive(self) -> None:
        async with receiving() as (_, receiver, outputs):
            receiver.expect(FIRST, request(prompt_of(16), max_tokens=1, num_logprobs=1))
            await receiver.open(key_of(), geometry_of(), 1, 1)
            receiver.apply(key_of(), chunk_of(0, 0))
            last = token(token_id=VOCAB_SIZE - 1, logprob=0.0, top_logprobs=top(-1.0, token_id=VOCAB_SIZE - 1))
            receiver.commit(key_of(), commit_of(1, first_tokens=[last], num_cached_tokens=16))
            assert [t.token_id for o in outputs for t in o.tokens] == [VOCAB_SIZE - 1]
            receiver.forget(FIRST)

    @pytest.mark.parametrize(
        "change",
        [{"first_block": 1, "num_blocks": 2}, {"first_layer": 1}, {"first_head": 1}, {"num_layers": 0}, {"num_heads": 0}],
    )
    async def test_a_chunk_that_ends_one_past_the_prompt_is_refused(self, change: dict[str, object]) -> None:
        async with receiving() as (_, receiver, _):
            receiver.expect(FIRST, request(prompt_of(32)))
            await receiver.open(key_of(), geometry_of(), 2, 1)
            with pytest.raises(CorruptTransfer, match="not all outstanding"):
                receiver.apply(key_of(), chunk_of(0, 0, **change))
            receiver.forget(FIRST)
