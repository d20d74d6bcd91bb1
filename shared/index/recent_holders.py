"""Who holds a block, among thousands of workers? A table of fixed size in Redis answers for most blocks, in one small call.

    slot of a block = the first 22 bits of its hash        [ 4 last bytes of the hash | 4 bytes that name a worker's boot ]

Workers write what they store, the latest wins, and nothing is ever removed: an entry is a hint, and whoever uses it asks that
worker's own set whether it is true. So the table needs no care, cannot grow (32 MiB), and a lookup costs the same however many
workers there are. Small fleets do without it, since all workers' sets can be asked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from shared.base.block_hash import HASH_BYTES
from shared.base.worker_info import BootId

MANY_WORKERS = 64  # from here on the table is written, and read
MAX_PROBES = 32
MAX_HOLDERS = 4
_NUM_SLOTS = 2**22
_HALF = 4  # bytes of the hash, and of the boot, in an entry

_SLOT = f"""
local function slot(hash)
  local a, b, c = string.byte(hash, 1, 3)
  return ((a * 256 + b) * 256 + c) % {_NUM_SLOTS} * {2 * _HALF}
end
"""

# A function for other scripts: enters each hash of a blob for one boot. The table lives as long as its writers.
NOTE_HOLDER = (
    _SLOT
    + f"""
local function note_holder(table_key, blob, boot, ttl_ms)
  for start = 1, #blob, {HASH_BYTES} do
    local hash = string.sub(blob, start, start + {HASH_BYTES - 1})
    redis.pcall('SETRANGE', table_key, slot(hash), string.sub(hash, {HASH_BYTES - _HALF + 1}) .. boot)
  end
  redis.call('PEXPIRE', table_key, ttl_ms)
end
"""
)

# KEYS: table. ARGV: some hashes, most wanted ones first. Returns the boots found, each once.
FIND_HOLDERS = (
    _SLOT
    + f"""
local found, seen = {{}}, {{}}
for start = 1, #ARGV[1], {HASH_BYTES} do
  local hash = string.sub(ARGV[1], start, start + {HASH_BYTES - 1})
  local at = slot(hash)
  local entry = redis.pcall('GETRANGE', KEYS[1], at, at + {2 * _HALF - 1})
  if type(entry) == 'string' and string.sub(entry, 1, {_HALF}) == string.sub(hash, {HASH_BYTES - _HALF + 1}) then
    local boot = string.sub(entry, {_HALF + 1})
    if not seen[boot] then
      seen[boot] = true
      found[#found + 1] = boot
    end
  end
  if #found == {MAX_HOLDERS} then break end
end
return found
"""
)


def boot_tag(boot_id: BootId) -> bytes:
    """Four bytes that name a boot in the table."""
    return blake2b(boot_id.encode(), digest_size=_HALF, person=b"twostroke-boot").digest()


def probes(hashes: Sequence[bytes]) -> list[bytes]:
    """Up to `MAX_PROBES` of a prompt's hashes, the last first: who holds a late block holds most of the prompt."""
    step = -(-len(hashes) // MAX_PROBES) if hashes else 1
    return list(hashes[::-step])
