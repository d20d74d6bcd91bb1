"""What the cache says of blocks, and what it tells the index, example by example."""

from __future__ import annotations

import pytest

from shared.engine.schedule.prefix_cache import PrefixCache

A, B, C = b"a", b"b", b"c"


def made(*hashes: bytes) -> PrefixCache:
    """Block 1 has the first hash, block 2 the second, and so on; all in use."""
    cache = PrefixCache()
    for block, block_hash in enumerate(hashes, 1):
        cache.register(block_hash, block)
    return cache


def test_a_registered_block_is_found_by_its_hash_and_no_other() -> None:
    cache = made(A, B)
    assert (cache.find(A), cache.find(B), cache.find(C)) == (1, 2, None)
    assert (1 in cache, 2 in cache, 3 in cache) == (True, True, False)
    assert cache.hashes() == [A, B]


def test_of_two_blocks_with_the_same_tokens_the_first_stays_known() -> None:
    cache = made(A)
    cache.register(A, 9)
    assert cache.find(A) == 1
    assert 9 not in cache
    assert cache.drain_events() == ([A], [])


def test_a_block_under_a_second_hash_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="block 1 "):
        made(A).register(B, 1)


def test_the_block_released_longest_ago_is_evicted_first_and_forgotten() -> None:
    cache = made(A, B, C)
    for block in (2, 3, 1):
        cache.release(block)
    assert cache.num_evictable == 3
    assert [cache.evict(), cache.evict()] == [2, 3]
    assert (cache.num_evictable, cache.find(B), cache.find(C), cache.find(A)) == (1, None, None, 1)
    assert 2 not in cache


def test_a_block_that_is_used_again_is_not_evicted_and_goes_to_the_end_when_released_again() -> None:
    cache = made(A, B)
    cache.release(1)
    cache.release(2)
    cache.reuse(1)
    assert cache.num_evictable == 1
    cache.release(1)
    assert [cache.evict(), cache.evict()] == [2, 1]


def test_events_tell_what_came_and_went_once() -> None:
    cache = made(A, B)
    assert cache.drain_events() == ([A, B], [])
    assert cache.drain_events() == ([], [])
    cache.release(1)
    cache.evict()
    cache.register(C, 1)
    assert cache.drain_events() == ([C], [A])


def test_what_came_and_went_between_two_drains_is_in_no_event() -> None:
    cache = made(A)
    cache.release(1)
    cache.evict()
    assert cache.drain_events() == ([], [])
    cache.register(B, 1)
    cache.drain_events()
    cache.release(1)
    cache.evict()
    cache.register(B, 2)
    assert cache.drain_events() == ([], [])
    assert cache.find(B) == 2


def test_the_check_notices_what_does_not_agree_with_the_references() -> None:
    cache = made(A, B)
    cache.release(1)
    cache.check([0, 0, 1])
    for wrong in ([0, 1, 1], [0, 0, 0]):
        with pytest.raises(AssertionError, match="evictable"):
            cache.check(wrong)
