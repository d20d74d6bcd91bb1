"""A worker's side of the prefix index: keeps one Redis set equal to the hashes in this worker's cache.

The set holds 16-byte hashes and one marker, an 8-byte version. The marker lies in the set, not beside it, so nothing that
Redis may do (flush, eviction, expiry, restart, an older replica taking over) can keep the one and lose the other.

    batch v      if the set has marker v-1: apply the changes, and replace the marker by v. Else: refuse.
    snapshot v   fill a staging set of its own, in pieces; if it is complete, add marker v and rename it over the set.
    heartbeat    answers whether the set has the marker of the last version sent.

Why it converges. Versions are never used twice in a boot, and each script applies wholly or not at all. So by induction:
*a set with marker v holds exactly what the worker meant by version v*, since a batch got there from v-1, or a snapshot wrote all.
The worker is in doubt from the moment it sends a version until it is acknowledged, and whenever a heartbeat does not find the last
version; in doubt, it sends a snapshot. Messages of a lost connection that Redis executes late do no harm: a late batch does not
find its predecessor, and a late snapshot leaves a marker that the next heartbeat does not find. Hence after the last fault, one
heartbeat and one snapshot make the set right, and while a heartbeat finds its marker, the set *is* right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from redis.asyncio import Redis

from shared.base.block_hash import HASH_BYTES
from shared.base.worker_info import BootId, WorkerId
from shared.index.keys import Keys
from shared.index.metrics import EVENTS, SNAPSHOTS
from shared.index.recent_holders import MANY_WORKERS, NOTE_HOLDER, boot_tag

# Hashes in one script call: about 2 ms of Redis on a slow core, so that others' lookups get in between.
MAX_HASHES_PER_CALL = 2048

# Hashes come as one run of bytes, which is much cheaper to send and to parse than an argument each. Lua's stack bounds `unpack`.
_EACH_HASH = f"""
local function each_hash(command, key, blob)
  for start = 1, #blob, {HASH_BYTES} * 1000 do
    local part = {{}}
    for i = start, math.min(start + {HASH_BYTES} * 1000, #blob + 1) - 1, {HASH_BYTES} do
      part[#part + 1] = string.sub(blob, i, i + {HASH_BYTES} - 1)
    end
    redis.call(command, key, unpack(part))
  end
end
"""

# KEYS: set, holders. ARGV: marker before, marker after, TTL in ms, stored, removed, boot tag or nothing.
# The marker is added first: without memory for it, the script ends here, and nothing has changed.
_BATCH = (
    _EACH_HASH
    + NOTE_HOLDER
    + """
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('SREM', KEYS[1], ARGV[1])
each_hash('SREM', KEYS[1], ARGV[5])
each_hash('SADD', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
if ARGV[6] ~= '' then note_holder(KEYS[2], ARGV[4], ARGV[6], ARGV[3]) end
return 1
"""
)

# KEYS: staging set, holders. ARGV: TTL in ms, stored, boot tag or nothing.
_STAGE = (
    _EACH_HASH
    + NOTE_HOLDER
    + """
each_hash('SADD', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
if ARGV[3] ~= '' then note_holder(KEYS[2], ARGV[2], ARGV[3], ARGV[1]) end
"""
)

# KEYS: staging set, set. ARGV: marker, TTL in ms, number of hashes there must be.
_COMMIT = """
if redis.call('SCARD', KEYS[1]) ~= tonumber(ARGV[3]) then return 0 end
redis.call('SADD', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('UNLINK', KEYS[2])
redis.call('RENAME', KEYS[1], KEYS[2])
return 1
"""


class BlockSource(Protocol):
    """The cache whose content is published. Called from the event loop; takes its own lock."""

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes (stored, removed) since the last call, the first time since the cache was empty. What came and went in
        between may be in neither list, and nothing is in both."""


class BlockPublisher:
    """Sends what changed, or all of it when in doubt. Not for concurrent use: one task calls it."""

    def __init__(self, redis: Redis, keys: Keys, worker_id: WorkerId, boot_id: BootId, blocks: BlockSource, ttl_ms: int) -> None:
        self.key = keys.blocks(worker_id, boot_id)
        self._holders_key = keys.holders
        self._boot_tag = boot_tag(boot_id)
        self._redis = redis
        self._blocks = blocks
        self._ttl_ms = ttl_ms
        self._held: set[bytes] = set()  # as of the last drain: a snapshot of the live cache would overlap with the next events
        self._version = 0
        self._in_doubt = True  # Redis may hold anything, or nothing
        self._is_in_many = False  # workers: the table of recent holders is written

    @property
    def marker(self) -> bytes:
        """Of the last version sent."""
        return self._version.to_bytes(8, "big")

    def doubt(self) -> None:
        self._in_doubt = True

    def see_fleet(self, num_workers: int) -> None:
        """Whoever becomes one of many sends everything once more, because nothing of it is in the table of recent holders."""
        is_in_many = num_workers > MANY_WORKERS
        if is_in_many and not self._is_in_many:
            self.doubt()
        self._is_in_many = is_in_many

    async def flush(self) -> None:
        """Brings the set up to date. Raises what the Redis client raises, and then is in doubt."""
        stored, removed = self._blocks.drain_events()
        self._held.difference_update(removed)
        self._held.update(stored)
        if not (stored or removed or self._in_doubt):
            return
        was_in_doubt, self._in_doubt = self._in_doubt, True
        is_done = not was_in_doubt and await self._apply(stored, removed)
        self._in_doubt = not (is_done or await self._replace())

    @property
    def _tag(self) -> bytes:
        return self._boot_tag if self._is_in_many else b""

    async def _apply(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> bool:
        """False if the set is not what this worker made of it."""
        for some_stored, some_removed in chain(((part, b"") for part in _parts(stored)), ((b"", part) for part in _parts(removed))):
            before = self.marker
            self._version += 1
            values = (before, self.marker, self._ttl_ms, some_stored, some_removed, self._tag)
            if not await self._redis.eval(_BATCH, 2, self.key, self._holders_key, *values):
                return False
        EVENTS.labels("stored").inc(len(stored))
        EVENTS.labels("removed").inc(len(removed))
        return True

    async def _replace(self) -> bool:
        """False if the staging set was lost on the way."""
        self._version += 1
        SNAPSHOTS.inc()
        hashes = list(self._held)
        staging = f"{self.key}:{self._version}"
        for part in _parts(hashes):
            await self._redis.eval(_STAGE, 2, staging, self._holders_key, self._ttl_ms, part, self._tag)
        return bool(await self._redis.eval(_COMMIT, 2, staging, self.key, self.marker, self._ttl_ms, len(hashes)))


def _parts(hashes: Sequence[bytes]) -> Iterator[bytes]:
    for start in range(0, len(hashes), MAX_HASHES_PER_CALL):
        yield b"".join(hashes[start : start + MAX_HASHES_PER_CALL])
