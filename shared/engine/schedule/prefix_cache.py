"""Which blocks can be found by their hash, which of them may be overwritten, and what the shared index must be told.

    computed and full ──register──> cached, in use ──release──> evictable ──evict──> gone
                                         ^────────reuse─────────────┘

An evictable block is free memory that still has a use. The one released longest ago goes first; whoever releases a sequence
starts at its last block, so that a prefix outlives its own continuations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    """Hash to block and back. Knows nothing of sequences; reference counts are the block manager's."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest release first
        self._stored: dict[bytes, None] = {}  # since the last drain; dicts keep the order of events
        self._removed: dict[bytes, None] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def hashes(self) -> list[bytes]:
        return list(self._block_of)

    def register(self, block_hash: bytes, block: int) -> None:
        """Makes a full, computed block findable. If another block already has these tokens, that one stays the known one."""
        if block_hash in self._block_of:
            return
        assert block not in self._hash_of, f"block {block} is registered under another hash"
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def reuse(self, block: int) -> None:
        """An evictable block has a reader again."""
        del self._evictable[block]

    def release(self, block: int) -> None:
        """A registered block has lost its last reader."""
        self._evictable[block] = None

    def evict(self) -> int:
        """Forgets the block released longest ago and gives it away."""
        block, _ = self._evictable.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None
        return block

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes (stored, removed) since the last call. What came and went in between cancels out, so neither list is ever longer
        than the pool."""
        events = list(self._stored), list(self._removed)
        self._stored.clear()
        self._removed.clear()
        return events

    def check(self, ref_counts: Sequence[int]) -> None:
        """Raises AssertionError unless both directions agree and exactly the unreferenced cached blocks are evictable."""
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of, "hash map is not one to one"
        unreferenced = {block for block in self._hash_of if ref_counts[block] == 0}
        assert set(self._evictable) == unreferenced, f"evictable {set(self._evictable)}, but unreferenced {unreferenced}"
        assert self._stored.keys() <= self._block_of.keys(), "an event says stored for a hash that is gone"
        assert not self._removed.keys() & self._block_of.keys(), "an event says removed for a hash that is here"
