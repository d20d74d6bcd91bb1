"""Placement: what the cost model promises, whatever its constants are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.dispatch.placement import Placement, place
from shared.base.errors import Unavailable
from shared.base.worker_info import Load, Role, WorkerInfo

IDLE = Load(num_free_blocks=1000, prefill_tokens_per_s=1000.0)


def worker(
    worker_id: str, role: Role, *, load: Load = IDLE, digest: str = "d", model: str = "m", draining: bool = False
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        boot_id=f"boot-{worker_id}",
        role=role,
        address=f"{worker_id}:1",
        model=model,
        digest=digest,
        block_size=16,
        num_blocks=1000,
        max_model_len=8192,
        max_num_seqs=8,
        draining=draining,
        load=load,
    )


def busy(num_running: int = 0, num_waiting_tokens: int = 0) -> Load:
    return replace(IDLE, num_running=num_running, num_waiting_tokens=num_waiting_tokens)


loads = st.builds(
    Load,
    num_running=st.integers(0, 20),
    num_waiting=st.integers(0, 20),
    num_waiting_tokens=st.integers(0, 50_000),
    num_free_blocks=st.integers(0, 1000),
    prefill_tokens_per_s=st.sampled_from([0.0, 50.0, 1000.0, 30_000.0]),
)
fleets = st.lists(
    st.builds(
        worker,
        st.sampled_from([f"w{i}" for i in range(8)]),
        st.sampled_from(Role),
        load=loads,
        digest=st.sampled_from(["d", "e"]),
        model=st.sampled_from(["m", "n"]),
        draining=st.booleans(),
    ),
    unique_by=lambda w: w.worker_id,
)
counts = st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), st.integers(0, 100))


@settings(max_examples=120, deadline=None)
@given(fleets, counts, counts, st.sets(st.sampled_from([f"w{i}" for i in range(8)])), st.integers(1, 8192), st.text(max_size=3))
def test_chosen_workers_are_usable_and_compatible_and_the_choice_is_deterministic(
    fleet: list[WorkerInfo],
    cached: dict[str, int],
    extra: dict[str, int],
    exclude: set[str],
    prompt_tokens: int,
    tie_breaker: str,
) -> None:
    usable = {w.worker_id for w in fleet if not w.draining and w.worker_id not in exclude}
    try:
        placement = place(prompt_tokens, fleet, cached, extra, exclude, tie_breaker)
    except Unavailable:
        assert not any(w.role.can_decode for w in fleet if w.worker_id in usable)
        return
    assert placement == place(prompt_tokens, fleet[::-1], cached, extra, sorted(exclude), tie_breaker)
    assert placement.decode.worker_id in usable
    assert placement.decode.role.can_decode
    if placement.prefill is not None:
        assert placement.prefill.worker_id in usable
        assert (placement.prefill.role, placement.decode.role) == (Role.PREFILL, Role.DECODE)
        assert placement.prefill.digest == placement.decode.digest
        assert placement.prefill.model == placement.decode.model


@given(st.integers(100, 8192), st.integers(1, 6), st.sampled_from("abc"), st.text(max_size=3))
def test_longer_cached_prefix_wins_at_equal_load(prompt_tokens: int, num_cached: int, holder: str, tie_breaker: str) -> None:
    for role in (Role.COLOCATED, Role.DECODE):
        fleet = [worker(name, role) for name in "abc"]
        cached = dict.fromkeys("abc", num_cached - 1) | {holder: num_cached}
        assert place(prompt_tokens, fleet, cached, {}, (), tie_breaker).decode.worker_id == holder
    prefills = [worker(name, Role.PREFILL) for name in "abc"]
    decode = worker("d", Role.DECODE, load=busy(num_running=7, num_waiting_tokens=100_000))  # never itself
    placement = place(prompt_tokens, [*prefills, decode], cached, {}, (), tie_breaker)
    assert placement.prefill is not None
    assert placement.prefill.worker_id == holder


@given(st.integers(1, 8192), st.integers(0, 100), st.sampled_from("abc"), st.text(max_size=3))
def test_idle_worker_wins_at_equal_prefix(prompt_tokens: int, num_cached: int, idle: str, tie_breaker: str) -> None:
    cached = dict.fromkeys("abc", num_cached)
    for load in (busy(num_running=3), busy(num_waiting_tokens=500), replace(IDLE, num_waiting=2)):
        fleet = [worker(name, Role.COLOCATED, load=IDLE if name == idle else load) for name in "abc"]
        assert place(prompt_tokens, fleet, cached, {}, (), tie_breaker).decode.worker_id == idle


@given(st.sampled_from("abc"), st.integers(1, 50))
def test_requests_sent_since_the_heartbeat_count_as_load(idle: str, num_sent: int) -> None:
    fleet = [worker(name, Role.COLOCATED) for name in "abc"]
    extra = {name: num_sent for name in "abc" if name != idle}
    assert place(1000, fleet, {}, extra).decode.worker_id == idle


def test_long_uncached_prompt_is_handed_off() -> None:
    fleet = [worker("p", Role.PREFILL), worker("d", Role.DECODE, load=busy(num_running=4))]
    assert place(2000, fleet, {}, {}) == Placement(*fleet)


def test_short_uncached_suffix_stays_at_decode() -> None:
    fleet = [worker("p", Role.PREFILL), worker("d", Role.DECODE)]
    assert place(2000, fleet, {"d": 124}, {}) == Placement(None, fleet[1])  # 16 tokens are left


def test_busy_streams_make_decode_hand_off_what_it_would_compute_when_idle() -> None:
    prefill, decode = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    assert place(100, [prefill, decode], {"d": 4}, {}).prefill is None
    streaming = replace(decode, load=busy(num_running=7))
    assert place(100, [prefill, streaming], {"d": 4, "p": 4}, {}).prefill == prefill


def test_queue_at_prefill_makes_an_idle_decode_worker_compute_the_prompt() -> None:
    prefill, decode = worker("p", Role.PREFILL, load=busy(num_waiting_tokens=20_000)), worker("d", Role.DECODE)
    assert place(1000, [prefill, decode], {}, {}) == Placement(None, decode)


def test_decode_and_colocated_workers_serve_alone() -> None:
    for role in (Role.DECODE, Role.COLOCATED):
        alone = worker("w", role)
        assert place(1000, [alone], {}, {}) == Placement(None, alone)


def test_colocated_worker_is_never_handed_blocks() -> None:
    fleet = [worker("p", Role.PREFILL), worker("c", Role.COLOCATED, load=busy(num_running=8, num_waiting_tokens=10_000))]
    assert place(4000, fleet, {}, {}) == Placement(None, fleet[1])


def test_unmeasured_worker_is_taken_to_be_as_fast_as_its_peers() -> None:
    slow = replace(IDLE, prefill_tokens_per_s=10.0)
    fleet = [
        worker("known", Role.COLOCATED, load=slow),
        worker("new", Role.COLOCATED, load=replace(IDLE, prefill_tokens_per_s=0.0)),
    ]
    assert place(1000, fleet, {"known": 1}, {}).decode.worker_id == "known"


def test_worker_without_free_blocks_is_avoided() -> None:
    full = worker("full", Role.DECODE, load=replace(IDLE, num_free_blocks=10))
    assert place(1000, [full, worker("free", Role.DECODE, load=busy(num_running=6))], {}, {}).decode.worker_id == "free"


def test_hot_prefix_spreads_once_its_holder_queues() -> None:
    fleet = [worker(name, Role.COLOCATED) for name in "abcd"]
    sent: Counter[str] = Counter()
    for number in range(24):
        sent[place(1000, fleet, {"a": 60}, sent, tie_breaker=str(number)).decode.worker_id] += 1
    assert sent["a"] == max(sent.values())
    assert sent["a"] > min(sent.values()) > 0


def test_hot_prefix_spreads_over_prefill_workers_once_its_holder_queues() -> None:
    decode = worker("d", Role.DECODE, load=busy(num_running=7))
    hot = worker("hot", Role.PREFILL)
    cold = worker("cold", Role.PREFILL)
    assert place(1000, [hot, cold, decode], {"hot": 50}, {}).prefill == hot
    queued = replace(hot, load=busy(num_waiting_tokens=1500))
    assert place(1000, [queued, cold, decode], {"hot": 50}, {}).prefill == cold


def test_ties_go_to_different_workers_for_different_tie_breakers() -> None:
    fleet = [worker(name, Role.COLOCATED) for name in "abcd"]
    assert {place(100, fleet, {}, {}, (), str(n)).decode.worker_id for n in range(100)} == set("abcd")


def test_error_names_what_is_missing() -> None:
    with pytest.raises(Unavailable, match=r"no decode worker is registered \(1 prefill workers are\)"):
        place(10, [worker("p", Role.PREFILL)], {}, {})
    fleet = [worker("a", Role.DECODE, draining=True), worker("b", Role.DECODE), worker("c", Role.COLOCATED)]
    with pytest.raises(Unavailable, match="1 draining, 2 failing"):
        place(10, fleet, {}, {}, exclude=("b", "c"))
    with pytest.raises(Unavailable, match="1 draining, 2 too small for 9000 tokens"):
        place(9000, fleet, {}, {})


def test_measured_transfers_decide_whether_a_handoff_pays() -> None:
    fleet = [worker("p", Role.PREFILL), worker("d", Role.DECODE, load=busy(num_running=3))]
    assert place(1000, fleet, {}, {}, transfer_s={"p": 0.01}) == Placement(*fleet)
    assert place(1000, fleet, {}, {}, transfer_s={"p": 10.0}) == Placement(None, fleet[1])


def test_a_full_batch_loses_to_a_free_slot_and_the_fuller_of_two_to_the_other() -> None:
    full = worker("full", Role.COLOCATED, load=replace(IDLE, num_running=8))
    last_slot = worker("last slot", Role.COLOCATED, load=replace(IDLE, num_running=7, num_waiting_tokens=500))
    assert place(100, [full, last_slot], {}, {}).decode == last_slot  # though half a second of prompts is ahead there
    overfull = worker("overfull", Role.COLOCATED, load=replace(IDLE, num_running=8, num_waiting=1))
    assert place(100, [overfull, full], {}, {}).decode == full


def test_the_same_weights_pair_in_a_fixed_example_with_a_cheap_wrong_partner() -> None:
    right = worker("right", Role.PREFILL, load=busy(num_waiting_tokens=3000))
    wrong = worker("wrong", Role.PREFILL, digest="other")
    decode = worker("decode", Role.DECODE)
    assert place(2000, [wrong, right, decode], {}, {}, always_hand_off=True) == Placement(right, decode)
    assert place(2000, [wrong, decode], {}, {}, always_hand_off=True) == Placement(None, decode)


def test_order_is_worked_out_for_equals_only_and_does_not_decide_against_cost() -> None:
    fleet = [worker(name, Role.COLOCATED, load=busy(num_running=i)) for i, name in enumerate("abc")]
    assert {place(100, fleet, {}, {}, (), str(n)).decode.worker_id for n in range(30)} == {"a"}
