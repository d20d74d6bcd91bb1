"""Who owns which KV block. The only ledger of blocks: sequences hold block tables, this counts the references.

A sequence of 40 tokens with a block size of 16, whose first 32 tokens were found in the prefix cache:

    tokens        0 ........ 15 16 ....... 31 32 .... 39
    block_table   [     7      |      3      |     9    ]
    references         2..            2..          1
                  cached prefix, shared      private, written by the next steps

A block is referenced (by one table or more), evictable (unreferenced, but it can be found by its hash) or empty. Empty
blocks are handed out first. A block is written only while its reference count is 1: `grow` replaces a shared one by a copy.
Block 0 is the null block: no sequence owns it, and padding points there.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Iterable

from shared.base.block_hash import next_hash
from shared.base.blocks_of import num_blocks_of
from shared.engine.schedule.prefix_cache import PrefixCache
from shared.engine.schedule.sequence import Sequence


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens each; ids 1 .. num_blocks - 1 are handed out."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_usable_blocks = num_blocks - 1
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, 0, -1))  # a stack: low ids first, then the most recently used
        self._cache = PrefixCache()

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced: empty, or cached and evictable."""
        return len(self._empty) + self._cache.num_evictable

    def num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_of(num_tokens, self.block_size)

    # --- a sequence's blocks, from its admission to its end

    def match_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """The longest run of cached blocks at the front of the sequence, covering at most `max_tokens` tokens."""
        matched: list[int] = []
        if not self._enable_prefix_caching:
            return matched
        for index in range(min(max_tokens, sequence.num_tokens) // self.block_size):
            block = self._cache.find(self._block_hash(sequence, index))
            if block is None:
                break
            matched.append(block)
        return matched

    def can_allocate(self, sequence: Sequence, max_cached_tokens: int, num_spare_blocks: int = 0) -> bool:
        """Whether `allocate` with the same arguments would succeed."""
        return self._fits(sequence, self.match_prefix(sequence, max_cached_tokens), num_spare_blocks)

    def allocate(self, sequence: Sequence, max_cached_tokens: int, num_spare_blocks: int = 0) -> bool:
        """Gives the sequence blocks for all its tokens: cached ones for a prefix of at most `max_cached_tokens`, which then counts
        as computed, and new ones for the rest. Returns False, having changed nothing, if fewer than `num_spare_blocks` would be
        left free."""
        assert not sequence.block_table, f"{sequence.id} already holds blocks"
        matched = self.match_prefix(sequence, max_cached_tokens)
        if not self._fits(sequence, matched, num_spare_blocks):
            return False
        for block in matched:  # before any new block is taken, so that none of them is evicted for it
            self._share(block)
        num_new = self.num_blocks_for(sequence.num_tokens) - len(matched)
        sequence.block_table = matched + [self._take() for _ in range(num_new)]
        sequence.num_computed_tokens = len(matched) * self.block_size
        return True

    def grow(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        """Makes room for all the sequence's tokens, and makes the blocks that its uncomputed tokens go to its own.

        Returns (source, target) blocks to copy before the next forward pass; None, having changed nothing, if too few are free.
        """
        table = sequence.block_table
        first_written = sequence.num_computed_tokens // self.block_size
        num_new = max(0, self.num_blocks_for(sequence.num_tokens) - len(table))
        copies: list[tuple[int, int]] = []
        if not num_new and first_written == len(table) - 1 and self._ref_counts[table[-1]] == 1:
            return copies  # nearly always, so worth an early exit
        shared = [index for index in range(first_written, len(table)) if self._ref_counts[table[index]] > 1]
        if len(shared) + num_new > self.num_free_blocks:
            return None
        for index in shared:
            source, table[index] = table[index], self._take()
            self._release(source)
            copies.append((source, table[index]))
        table.extend(self._take() for _ in range(num_new))
        return copies

    def num_blocks_to_grow(self, decodes: Iterable[Sequence]) -> int:
        """How many blocks `grow` will take in all for these sequences, each with one uncomputed token.

        Exact: of k writers of one shared block each takes a copy, but the last one of its r readers writes in place: min(k, r - 1).
        """
        num_new = 0
        num_writers: dict[int, int] = {}
        for sequence in decodes:
            table, index = sequence.block_table, sequence.num_computed_tokens // self.block_size
            if index == len(table):
                num_new += 1
            elif self._ref_counts[table[index]] > 1:
                num_writers[table[index]] = num_writers.get(table[index], 0) + 1
        return num_new + sum(min(writers, self._ref_counts[block] - 1) for block, writers in num_writers.items())

    def append_blocks(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Gives each of these sequences one more block. Returns False, having changed nothing, if too few are free."""
        if len(sequences) > self.num_free_blocks:
            return False
        for sequence in sequences:
            sequence.block_table.append(self._take())
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, which holds no blocks, shares all of the parent's."""
        assert not child.block_table, f"{child.id} already holds blocks"
        for block in parent.block_table:
            self._ref_counts[block] += 1
        child.block_table = parent.block_table.copy()
        child.block_hashes = parent.block_hashes.copy()
        child.num_computed_tokens = parent.num_computed_tokens

    def mark_computed(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """The KV of this many tokens is now in the sequence's blocks; those that have become full can be found by their hash."""
        first_new = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens = num_computed_tokens
        if self._enable_prefix_caching:
            for index in range(first_new, num_computed_tokens // self.block_size):
                self._cache.register(self._block_hash(sequence, index), sequence.block_table[index])

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's references back, last block first: a prefix is evicted after what follows it."""
        for block in reversed(sequence.block_table):
            self._release(block)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    # --- for the index of who has which prefix

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes (stored, removed) since the last call; what was stored and removed again in between is in neither."""
        return self._cache.drain_events()

    def cached_hashes(self) -> list[bytes]:
        return self._cache.hashes()

    # --- integrity

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Recounts every block from the tables of all sequences that hold any. Raises AssertionError on the first discrepancy."""
        counted: Counter[int] = Counter()
        for sequence in sequences:
            table = sequence.block_table
            assert len(set(table)) == len(table), f"{sequence.id} lists a block twice: {table}"
            assert sequence.num_computed_tokens <= len(table) * self.block_size, (
                f"{sequence.id} has fewer blocks than computed tokens"
            )
            counted.update(table)
        assert 0 not in counted, "block 0 is in a table"
        for block, references in enumerate(self._ref_counts):
            assert references == counted[block], f"block {block} is in {counted[block]} tables but counts {references} references"
        self._cache.check(self._ref_counts)
        empty = {block for block in range(1, len(self._ref_counts)) if not counted[block] and block not in self._cache}
        assert sorted(self._empty) == sorted(empty), f"empty blocks are {sorted(empty)}, the list says {sorted(self._empty)}"
        assert self.num_free_blocks + len(counted) == self.num_usable_blocks, "free and referenced blocks are not the whole pool"

    # --- single blocks

    def _fits(self, sequence: Sequence, matched: list[int], num_spare_blocks: int) -> bool:
        """A matched block without references is free until it is taken."""
        num_new = self.num_blocks_for(sequence.num_tokens) - len(matched)
        num_revived = sum(1 for block in matched if self._ref_counts[block] == 0)
        return num_new + num_revived + num_spare_blocks <= self.num_free_blocks

    def _take(self) -> int:
        block = self._empty.pop() if self._empty else self._cache.evict()
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            self._cache.reuse(block)
        self._ref_counts[block] += 1

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] > 0:
            return
        if block in self._cache:
            self._cache.release(block)
        else:
            self._empty.append(block)

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """Of the sequence's full block `index`. Tokens are only ever appended, so a hash once computed stays right."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else sequence.hash_seed
            hashes.append(next_hash(parent, sequence.token_ids[start : start + self.block_size]))
        return hashes[index]
