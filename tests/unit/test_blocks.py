"""The block manager alone: what is shared, what is copied, what is evicted first, and that a recount finds every error."""

from __future__ import annotations

import pytest

from shared.base.block_hash import block_hashes, hash_seed
from shared.base.request import Request, SamplingParams
from shared.engine.schedule.blocks import BlockManager
from shared.engine.schedule.sequence import Sequence

BLOCK_SIZE = 4
SEED = hash_seed("digest")


def sequence_of(token_ids: list[int], seed: bytes = SEED) -> Sequence:
    request = Request("r", token_ids, len(token_ids), SamplingParams())
    return Sequence(request, hash_seed=seed)


def computed(blocks: BlockManager, token_ids: list[int]) -> Sequence:
    """A sequence that holds blocks with all its tokens computed."""
    sequence = sequence_of(token_ids)
    assert blocks.allocate(sequence, max_cached_tokens=len(token_ids))
    blocks.mark_computed(sequence, len(token_ids))
    return sequence


def leave_cached(blocks: BlockManager, token_ids: list[int]) -> None:
    blocks.free(computed(blocks, token_ids))


TWELVE = list(range(100, 112))


def test_block_0_is_never_handed_out_and_all_others_are() -> None:
    blocks = BlockManager(num_blocks=9, block_size=BLOCK_SIZE)
    sequence = computed(blocks, list(range(32)))
    assert sorted(sequence.block_table) == list(range(1, 9))
    assert blocks.num_free_blocks == 0
    blocks.check([sequence])


def test_allocation_that_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(6, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)
    sequence = sequence_of(TWELVE + list(range(20)))
    assert not blocks.allocate(sequence, max_cached_tokens=31)
    assert sequence.block_table == []
    assert sequence.num_computed_tokens == 0
    assert blocks.num_free_blocks == 5
    blocks.check([])


def test_spare_blocks_are_left_free() -> None:
    blocks = BlockManager(5, BLOCK_SIZE)
    sequence = sequence_of(TWELVE)
    assert not blocks.can_allocate(sequence, 11, num_spare_blocks=2)
    assert not blocks.allocate(sequence, 11, num_spare_blocks=2)
    assert blocks.can_allocate(sequence, 11, num_spare_blocks=1)
    assert blocks.allocate(sequence, 11, num_spare_blocks=1)


def test_a_matched_block_that_nobody_reads_counts_as_free_only_until_it_is_taken() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)  # all 3 blocks are evictable
    assert not blocks.allocate(sequence_of([*TWELVE, 1]), max_cached_tokens=12)  # 3 revived + 1 new > 3
    sequence = sequence_of(TWELVE)
    assert blocks.allocate(sequence, max_cached_tokens=12)
    assert blocks.num_free_blocks == 0
    blocks.check([sequence])


def test_a_shared_prefix_takes_blocks_once() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    first = computed(blocks, TWELVE)
    second = sequence_of([*TWELVE[:8], 1, 2, 3])
    assert blocks.allocate(second, max_cached_tokens=10)
    assert second.num_computed_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert blocks.num_free_blocks == 9 - 4
    blocks.check([first, second])


@pytest.mark.parametrize(("max_cached_tokens", "expected"), [(12, 12), (11, 8), (8, 8), (7, 4), (3, 0)])
def test_a_cached_prefix_never_exceeds_its_cap(max_cached_tokens: int, expected: int) -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)
    sequence = sequence_of(TWELVE)
    assert blocks.allocate(sequence, max_cached_tokens)
    assert sequence.num_computed_tokens == expected


def test_a_prefix_matches_only_under_its_own_seed_and_only_from_the_front() -> None:
    blocks = BlockManager(20, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)
    assert blocks.match_prefix(sequence_of(TWELVE, hash_seed("digest", "tenant")), 12) == []
    assert blocks.match_prefix(sequence_of([9, *TWELVE[1:]]), 12) == []
    assert len(blocks.match_prefix(sequence_of([*TWELVE[:7], 9, *TWELVE[8:]]), 12)) == 1


def test_matching_hashes_no_further_than_the_first_miss() -> None:
    blocks = BlockManager(20, BLOCK_SIZE)
    leave_cached(blocks, TWELVE[:4])
    sequence = sequence_of(TWELVE + TWELVE)
    blocks.match_prefix(sequence, 24)
    assert len(sequence.block_hashes) == 2


def test_only_full_computed_blocks_can_be_found() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    sequence = sequence_of(TWELVE)
    assert blocks.allocate(sequence, 11)
    assert blocks.cached_hashes() == []
    blocks.mark_computed(sequence, 7)
    assert blocks.cached_hashes() == block_hashes(SEED, TWELVE[:4], BLOCK_SIZE)
    blocks.mark_computed(sequence, 12)
    assert blocks.cached_hashes() == block_hashes(SEED, TWELVE, BLOCK_SIZE)


def test_of_two_blocks_with_the_same_tokens_the_first_stays_known_and_the_other_becomes_empty() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    first, second = sequence_of(TWELVE), sequence_of(TWELVE)
    assert blocks.allocate(first, 11)
    assert blocks.allocate(second, 11)
    blocks.mark_computed(first, 12)
    blocks.mark_computed(second, 12)
    assert blocks.match_prefix(sequence_of(TWELVE), 12) == first.block_table
    blocks.check([first, second])
    known = first.block_table
    blocks.free(second)
    blocks.free(first)
    assert blocks.match_prefix(sequence_of(TWELVE), 12) == known
    blocks.check([])


def test_empty_blocks_are_used_before_cached_ones_are_evicted() -> None:
    blocks = BlockManager(6, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)
    assert blocks.allocate(sequence_of([1] * 8), 7)
    assert blocks.cached_hashes() == block_hashes(SEED, TWELVE, BLOCK_SIZE)


def test_eviction_starts_with_the_sequence_released_first_and_with_its_last_block() -> None:
    blocks = BlockManager(7, BLOCK_SIZE)
    other = list(range(200, 212))
    leave_cached(blocks, TWELVE)
    leave_cached(blocks, other)
    for expected_own in (2, 1, 0):
        assert blocks.allocate(sequence_of([expected_own] * 4), 3)
        assert len(blocks.match_prefix(sequence_of(TWELVE), 12)) == expected_own
        assert len(blocks.match_prefix(sequence_of(other), 12)) == 3
    assert blocks.allocate(sequence_of([7] * 4), 3)
    assert len(blocks.match_prefix(sequence_of(other), 12)) == 2


def test_a_reused_prefix_is_evicted_as_if_it_were_new() -> None:
    blocks = BlockManager(7, BLOCK_SIZE)
    other = list(range(200, 212))
    leave_cached(blocks, TWELVE)
    leave_cached(blocks, other)
    leave_cached(blocks, TWELVE)
    assert blocks.allocate(sequence_of([1] * 12), 11)
    assert len(blocks.match_prefix(sequence_of(TWELVE), 12)) == 3
    assert blocks.match_prefix(sequence_of(other), 12) == []


def test_growing_within_a_block_takes_nothing_and_past_its_end_takes_one() -> None:
    blocks = BlockManager(5, BLOCK_SIZE)
    sequence = computed(blocks, TWELVE[:7])
    for expected_blocks in (2, 3, 3):
        sequence.token_ids.append(1)
        assert blocks.num_blocks_to_grow([sequence]) == expected_blocks - len(sequence.block_table)
        assert blocks.grow(sequence) == []
        assert len(sequence.block_table) == expected_blocks
        blocks.mark_computed(sequence, sequence.num_tokens)
    blocks.check([sequence])


def test_growing_without_a_free_block_changes_nothing() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    sequence = computed(blocks, TWELVE)
    sequence.token_ids.append(1)
    table = list(sequence.block_table)
    assert blocks.grow(sequence) is None
    assert sequence.block_table == table
    blocks.check([sequence])


def test_a_fork_shares_all_blocks_and_the_last_writer_needs_no_copy() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    parent = computed(blocks, TWELVE[:6])
    children = [sequence_of(TWELVE[:6]), sequence_of(TWELVE[:6])]
    family = [parent, *children]
    for child in children:
        blocks.fork(parent, child)
    assert blocks.num_free_blocks == 7
    shared_block = parent.block_table[1]
    for token, member in enumerate(family):
        member.token_ids.append(token)
    assert blocks.num_blocks_to_grow(family) == 2
    assert blocks.num_blocks_to_grow(family[:2]) == 2
    copies = [blocks.grow(member) for member in family]
    assert [len(c or ()) for c in copies] == [1, 1, 0]
    assert [source for c in copies for source, _ in c or ()] == [shared_block] * 2
    assert [target for c in copies for _, target in c or ()] == [member.block_table[1] for member in family[:2]]
    assert len({member.block_table[1] for member in family}) == 3
    assert len({member.block_table[0] for member in family}) == 1
    blocks.check(family)
    for member in family:
        blocks.free(member)
    assert blocks.num_free_blocks == 9


def test_a_fork_at_a_block_boundary_needs_new_blocks_but_no_copies() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    parent, child = computed(blocks, TWELVE[:8]), sequence_of(TWELVE[:8])
    blocks.fork(parent, child)
    for member in (parent, child):
        member.token_ids.append(1)
    assert blocks.num_blocks_to_grow([parent, child]) == 2
    assert [blocks.grow(parent), blocks.grow(child)] == [[], []]
    blocks.check([parent, child])


def test_events_say_what_was_stored_and_removed_since_the_last_drain() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)
    hashes = block_hashes(SEED, TWELVE, BLOCK_SIZE)
    assert blocks.drain_events() == (hashes, [])
    assert blocks.drain_events() == ([], [])
    leave_cached(blocks, [1] * 4)
    assert blocks.drain_events() == (block_hashes(SEED, [1] * 4, BLOCK_SIZE), [hashes[2]])


def test_what_comes_and_goes_between_two_drains_is_no_event() -> None:
    blocks = BlockManager(4, BLOCK_SIZE)
    leave_cached(blocks, TWELVE)
    blocks.drain_events()
    leave_cached(blocks, [1] * 12)
    leave_cached(blocks, TWELVE)  # the ones are stored and removed, the twelve removed and stored again
    assert blocks.drain_events() == ([], [])
    assert sorted(blocks.cached_hashes()) == sorted(block_hashes(SEED, TWELVE, BLOCK_SIZE))


def test_nothing_is_cached_when_prefix_caching_is_off() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, enable_prefix_caching=False)
    leave_cached(blocks, TWELVE)
    sequence = sequence_of(TWELVE)
    assert blocks.allocate(sequence, 12)
    assert sequence.num_computed_tokens == 0
    assert blocks.cached_hashes() == []
    assert sequence.block_hashes == []


def test_a_recount_finds_a_leaked_a_doubled_and_a_foreign_block() -> None:
    blocks = BlockManager(10, BLOCK_SIZE)
    sequence = computed(blocks, TWELVE)
    with pytest.raises(AssertionError, match="0 tables but counts 1"):
        blocks.check([])
    with pytest.raises(AssertionError, match="2 tables but counts 1"):
        blocks.check([sequence, sequence])
    table = sequence.block_table
    for wrong, message in (
        ([*table, 0], "block 0"),
        ([*table, table[0]], "twice"),
        (table[:2], "fewer blocks"),
        ([*table, 9], "counts 0"),
    ):
        sequence.block_table = wrong
        with pytest.raises(AssertionError, match=message):
            blocks.check([sequence])
