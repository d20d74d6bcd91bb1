"""The fleet: which workers a request may go to, and what the router remembers of them between heartbeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.dispatch.fleet import Fleet
from services.router.dispatch.model_pool import ModelPool
from services.router.dispatch.pools import Members, Pools
from shared.base.block_hash import block_hashes, hash_seed
from shared.base.errors import InvalidRequest, Unavailable
from shared.base.request import Request, SamplingParams
from shared.base.worker_info import Load, Role, WorkerInfo
from shared.index.recent_holders import boot_tag

IDLE = Load(num_free_blocks=1000, prefill_tokens_per_s=1000.0)


def worker(worker_id: str, role: Role, **changes: object) -> WorkerInfo:
    info = WorkerInfo(worker_id, f"boot-{worker_id}", role, f"{worker_id}:1", "m", "d", 16, 1000, 8192, 8, load=IDLE)
    return replace(info, **changes)


class Watcher:
    """A registry that the test edits; the fleet is told as the real one tells it."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerInfo] = {}
        self.stale: set[str] = set()

    def is_stale(self, worker_id: str) -> bool:
        return worker_id in self.stale


class Prefixes:
    """A prefix index that knows what the test says: by worker id, how many leading blocks."""

    def __init__(self) -> None:
        self.cached: dict[str, int] = {}
        self.holders: list[str] = []
        self.asked: list[tuple[set[str], list[bytes]]] = []

    async def recent_holders(self, hashes):
        return [boot_tag(f"boot-{name}") for name in self.holders] if hashes else []

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


# What the router remembers between heartbeats


async def test_requests_sent_since_a_heartbeat_count_until_the_next_one():
    made = Made(worker("a", Role.COLOCATED), worker("b", Role.COLOCATED))
    first = (await where(made, request()))[1]
    other = {"a": "b", "b": "a"}[first]
    assert await where(made, request()) == (None, other)
    made.hear(worker(first, Role.COLOCATED))  # it reports a load that includes the request: none
    assert [(await where(made, request()))[1] for _ in range(2)].count(first) >= 1
    made.hear(worker("a", Role.COLOCATED))
    made.hear(worker("b", Role.COLOCATED))
    assert await where(made, request()) == (None, first)  # as in the beginning: nothing is left of what was sent


async def test_a_resting_worker_is_avoided_while_another_exists_and_used_when_none_does():
    made = Made(worker("a", Role.COLOCATED), worker("b", Role.COLOCATED, load=replace(IDLE, num_running=7)))
    assert await where(made, request()) == (None, "a")
    made.fleet.failed(made.watcher.workers["a"], Unavailable("gone"))
    for _ in range(3):
        assert await where(made, request()) == (None, "b")
    made.lose("b")
    assert await where(made, request()) == (None, "a")
    made.hear(worker("b", Role.COLOCATED, load=replace(IDLE, num_running=7)))
    made.fleet.succeeded(made.watcher.workers["a"])
    made.hear(worker("a", Role.COLOCATED))
    assert await where(made, request()) == (None, "a")


async def test_a_stale_worker_is_not_alive_but_better_than_none():
    made = Made(worker("a", Role.COLOCATED), worker("b", Role.COLOCATED, load=replace(IDLE, num_running=8)))
    made.watcher.stale.add("a")
    assert [w.worker_id for w in made.fleet.live()] == ["b"]
    for _ in range(3):
        assert await where(made, request()) == (None, "b")
    made.fleet.failed(made.watcher.workers["b"], Unavailable("gone"))
    assert await where(made, request()) == (None, "b")  # one that failed a moment ago, rather than one that is stuck
    made.lose("b")
    assert await where(made, request()) == (None, "a")


async def test_a_draining_worker_gets_nothing_and_a_restarted_one_starts_clean():
    made = Made(worker("a", Role.COLOCATED), worker("b", Role.COLOCATED, load=replace(IDLE, num_running=8)))
    made.hear(worker("a", Role.COLOCATED, draining=True))
    assert await where(made, request()) == (None, "b")
    assert [w.worker_id for w in made.fleet.live()] == ["b"]
    made.hear(worker("a", Role.COLOCATED))
    made.fleet.failed(made.watcher.workers["a"], Unavailable("gone"))
    made.hear(worker("a", Role.COLOCATED, boot_id="boot-2"))
    assert await where(made, request()) == (None, "a")


async def test_a_worker_that_changes_its_model_moves():
    made = Made(worker("a", Role.COLOCATED))
    made.hear(worker("a", Role.COLOCATED, model="n", digest="e", boot_id="boot-2"))
    assert set(made.fleet.models()) == {"n"}
    assert await where(made, request(model="n")) == (None, "a")
    with pytest.raises(Unavailable, match="'m'"):
        await made.fleet.place(request())


async def test_the_cache_counts_for_the_worker_that_has_it_under_the_engines_hashes():
    workers = [worker(name, Role.COLOCATED) for name in "abc"]
    for holder in "abc":
        made = Made(*workers)
        made.prefixes.cached = {holder: 50}
        asked = request(1000, salt="tenant")
        assert await where(made, asked) == (None, holder)
        engine_hashes = block_hashes(hash_seed("d", "tenant"), asked.token_ids, 16)  # as BlockManager makes them
        assert made.prefixes.asked == [({"a", "b", "c"}, engine_hashes)]


async def test_workers_of_other_weights_are_asked_for_other_hashes():
    made = Made(worker("a", Role.COLOCATED, digest="d1"), worker("b", Role.COLOCATED, digest="d2", block_size=32))
    asked = request(64)
    await made.fleet.place(asked)
    expected = [({"a"}, "d1", 16), ({"b"}, "d2", 32)]
    assert made.prefixes.asked == [(ids, block_hashes(hash_seed(d, ""), asked.token_ids, size)) for ids, d, size in expected]


# A thousand workers


def large(num_workers: int = 1000) -> Made:
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    return Made(*(worker(f"w{i}", roles[i % 3], load=replace(IDLE, num_running=i % 7)) for i in range(num_workers)))


async def test_of_many_workers_few_are_asked_the_holders_among_them():
    made = large()
    made.prefixes.holders, made.prefixes.cached = ["w500", "w7", "gone"], {"w500": 60, "w7": 3}
    assert (await where(made, request(1000)))[1] == "w500"
    ids, _ = made.prefixes.asked[0]
    assert {"w500", "w7"} <= ids
    assert len(ids) <= 6 + 6 + 2


async def test_of_many_workers_every_one_is_used_and_the_busier_ones_less():
    made = large(90)
    used = [(await where(made, request(request_id=str(n))))[1] for n in range(600)]
    assert len(set(used)) == 60
    assert max(used.count(name) for name in set(used)) < 4 * 600 / 60


async def test_of_many_workers_the_one_that_is_left_is_found():
    made = large(200)
    only = "w100"
    made.watcher.stale = set(made.watcher.workers) - {only}
    assert (await where(made, request()))[1] == only
    made.watcher.stale = set()
    exclude = {f"boot-{name}" for name in made.watcher.workers if name != only}
    assert await where(made, request(), exclude) == (None, only)


async def test_another_prefill_worker_is_found_among_many_for_a_given_decode_worker():
    made = large(200)
    made.fleet._always_hand_off = True
    decode = made.watcher.workers["w100"]
    prefill, chosen = await where(made, request(), digest="d", decode=decode)
    assert chosen == "w100"
    assert int(prefill[1:]) % 3 == 0


def test_members_are_drawn_from_all_and_forgotten_wholly():
    members = Members()
    for number in range(20):
        members.add(f"w{number}")
    for number in (0, 19, 7, 12):
        members.remove(f"w{number}")
    left = {f"w{n}" for n in range(20) if n not in (0, 19, 7, 12)}
    assert set(members) == left
    assert len(members) == 16
    drawn = [members.draw(3, 6, str(seed), lambda _: True) for seed in range(200)]
    assert all(len(set(some)) == len(some) <= 3 for some in drawn)
    assert sum(len(some) == 3 for some in drawn) > 190  # a number may come twice
    assert set().union(*drawn) == left
    assert members.draw(3, 6, "0", lambda _: True) == drawn[0]
    assert {name for seed in range(20) for name in members.draw(16, 16, str(seed), lambda name: name == "w5")} == {"w5"}
    assert all(len(members.draw(16, 2, str(seed), lambda _: True)) <= 2 for seed in range(50))
    for name in left:
        members.remove(name)
    assert list(members) == members.draw(3, 6, "0", lambda _: True) == []


def test_pools_notice_who_joins_changes_and_leaves_and_nothing_else():
    pools = Pools()
    info = worker("a", Role.DECODE)
    assert pools.see("a", info)
    assert not pools.see("a", replace(info, load=Load(num_running=5)))
    assert pools.see("a", replace(info, boot_id="again"))
    assert pools.with_tag(boot_tag("again")) == "a"
    assert pools.with_tag(boot_tag(info.boot_id)) is None
    for field, value in {"digest": "x", "model": "n", "role": Role.PREFILL, "max_model_len": 1, "max_num_seqs": 1}.items():
        assert pools.see("a", replace(info, **{field: value}))
    assert pools.see("a", replace(info, draining=True))
    assert not pools.see("a", None)
    with pytest.raises(Unavailable, match="no worker is registered"):
        pools.groups("")
