"""The fleet: which workers a request may go to, and what the router remembers of them between heartbeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.dispatch.fleet import Fleet
from services.router.dispatch.model_pool import ModelPool
from shared.base.errors import InvalidRequest, Unavailable
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import Load, Role, WorkerInfo

IDLE = Load(num_free_blocks=1000, prefill_tokens_per_s=1000.0)


def worker(worker_id: str, role: Role, **changes: object) -> WorkerInfo:
    info = WorkerInfo(worker_id, f"boot-{worker_id}", role, f"{worker_id}:1", "m", "d", 16, 1000, 8192, 8, load=IDLE)
    return replace(info, **changes)


class Watcher:
    """A registry that the test edits; the fleet is told as the real one tells it."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}


class Prefixes:
    """A prefix index that knows what the test says: by worker id, how many leading blocks."""

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}
        self.asked: list[tuple[set[str], list[bytes]]] = []

    async def longest_prefix(self, workers, hashes):
        self.asked.append(({w.worker_id for w in workers}, list(hashes)))
        return {w.worker_id: min(self.cached.get(w.worker_id, 0), len(hashes)) for w in workers}


class Made:
    def __init__(self, *workers: WorkerInfo, always_hand_off: bool = False) -> None:
        self.watcher, self.prefixes = Watcher(), Prefixes()
        self.fleet = Fleet(self.watcher, self.prefixes, None, always_hand_off)
        for info in workers:
            self.hear(info)

    def hear(self, info: WorkerInfo) -> None:
        self.watcher.workers[info.worker_id] = info
        self.fleet.notify_change(info.worker_id)

    def lose(self, worker_id: str) -> None:
        del self.watcher.workers[worker_id]
        self.fleet.notify_change(worker_id)


def request(num_tokens: int = 100, model: str = "m", salt: str = "", request_id: str = "r") -> Request:
    return Request(request_id, tuple(range(num_tokens)), num_tokens, SamplingParams(), cache_salt=salt, model=model)


async def where(made: Made, *args: object, **kwargs: object) -> tuple[str | None, str]:
    placement = await made.fleet.place(*args, **kwargs)
    return placement.prefill and placement.prefill.worker_id, placement.decode.worker_id


# Models and weights


async def test_a_request_goes_to_workers_of_its_model_only():
    made = Made(*(worker(f"{role.value}-{model}", role, model=model) for role in (Role.PREFILL, Role.DECODE) for model in "mn"))
    for number in range(20):
        assert await where(made, request(8000, "n", request_id=str(number))) in ((None, "decode-n"), ("prefill-n", "decode-n"))
        assert await where(made, request(8000, "m", request_id=str(number))) in ((None, "decode-m"), ("prefill-m", "decode-m"))
    with pytest.raises(Unavailable, match="model 'o'"):
        await made.fleet.place(request(model="o"))


async def test_a_request_without_a_model_goes_to_the_only_one_and_is_told_of_several():
    made = Made(worker("a", Role.DECODE, model="m"))
    assert await where(made, request(model="")) == (None, "a")
    made.hear(worker("b", Role.DECODE, model="n"))
    with pytest.raises(InvalidRequest, match="one of m, n") as caught:
        await made.fleet.place(request(model=""))
    assert caught.value.param == "model"
    made.lose("a")
    assert await where(made, request(model="")) == (None, "b")


async def test_a_continuation_stays_with_the_weights_that_it_began_with():
    made = Made(worker("old", Role.DECODE, digest="d1", load=replace(IDLE, num_running=8)), worker("new", Role.DECODE, digest="d2"))
    assert await where(made, request()) == (None, "new")
    assert await where(made, request(), digest="d1") == (None, "old")
    with pytest.raises(Unavailable, match="weights"):
        await made.fleet.place(request(), digest="d3")
    with pytest.raises(Unavailable):
        await made.fleet.place(request(), exclude=("boot-old",), digest="d1")


async def test_in_a_rolling_update_pairs_have_the_same_weights_however_cheap_the_others_are():
    queue = replace(IDLE, num_waiting_tokens=3000)
    made = Made(
        worker("old-prefill", Role.PREFILL, digest="d1", load=queue),
        worker("new-prefill", Role.PREFILL, digest="d2"),
        worker("old-decode", Role.DECODE, digest="d1"),
        worker("new-decode", Role.DECODE, digest="d2", load=replace(IDLE, num_running=30)),
        always_hand_off=True,
    )
    assert await where(made, request()) == ("old-prefill", "old-decode")


async def test_another_prefill_worker_for_a_given_decode_worker():
    decode = worker("d1", Role.DECODE)
    made = Made(
        worker("p1", Role.PREFILL),
        worker("p2", Role.PREFILL),
        worker("other", Role.PREFILL, digest="x"),
        decode,
        worker("d2", Role.DECODE),
        always_hand_off=True,
    )
    assert await where(made, request(), ("boot-p1",), digest="d", decode=decode) == ("p2", "d1")
    made.lose("d1")
    with pytest.raises(Unavailable):
        await made.fleet.place(request(), (), digest="d", decode=decode)


def test_models_lists_what_can_be_decoded_now_with_the_limits_that_all_its_workers_keep():
    made = Made(
        worker("p", Role.PREFILL, max_model_len=100, max_num_seqs=1),
        worker("d1", Role.DECODE, source="org/m", revision="v1", max_model_len=300, max_num_seqs=8),
        worker("d2", Role.COLOCATED, source="org/other", max_model_len=200, max_num_seqs=4),
        worker("n", Role.COLOCATED, model="n", max_model_len=50, max_num_seqs=2),
        worker("lonely", Role.PREFILL, model="prefill only"),
        worker("going", Role.DECODE, model="draining", draining=True),
    )
    assert made.fleet.models() == {"m": ModelPool("m", "org/m", "v1", 100, 4), "n": ModelPool("n", "", "", 50, 2)}
    made.lose("n")
    assert set(made.fleet.models()) == {"m"}
