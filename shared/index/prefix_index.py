"""The router's side of the prefix index: how much of a prompt does each worker hold?

One script call answers for all workers. It goes through the hashes chunk by chunk and asks only those workers that hold every
block so far, so a miss costs one small chunk. Measured on one slow core with 4,000 hashes and 8 workers that hold them all: 18 ms;
with 8 workers that hold none: 1 ms. (A pipelined SMISMEMBER per worker took 170 ms, nearly all of it spent in the client on
32,000 arguments and replies.) The script's work is bounded, because Redis does nothing else meanwhile.

An answer is a hint: blocks may be gone by the time the request arrives, and on failure there is no answer. After a failure,
lookups are given up at once until it is time to try again, so that a silent Redis does not add the deadline to every request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from shared.base.block_hash import HASH_BYTES
from shared.base.worker_info import WorkerId, WorkerInfo
from shared.index.connection import REDIS_ERRORS, connect, describe
from shared.index.entries import InvalidEntry, Refusals, read_boot_tags, read_counts
from shared.index.keys import Keys
from shared.index.metrics import ERRORS, LOOKUP_SECONDS
from shared.index.recent_holders import FIND_HOLDERS, MAX_HOLDERS, probes

log = logging.getLogger(__name__)
T = TypeVar("T")

CHUNK_BLOCKS = 64
MAX_CHECKS = 32_768  # membership tests in one lookup; about 20 ms of Redis on a slow core

# KEYS: the workers' sets. ARGV: hashes as one run of bytes, chunk size, most checks. Returns one count per set.
_LONGEST_PREFIX = f"""
local blob, chunk, checks_left = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local total, first, held, matching = #blob / {HASH_BYTES}, 0, {{}}, {{}}
for w = 1, #KEYS do held[w] = 0; matching[w] = w end
while first < total and #matching > 0 and checks_left >= #matching * chunk do
  local part = {{}}
  for i = first, math.min(first + chunk, total) - 1 do
    part[#part + 1] = string.sub(blob, i * {HASH_BYTES} + 1, (i + 1) * {HASH_BYTES})
  end
  checks_left = checks_left - #matching * chunk
  local still_matching = {{}}
  for _, w in ipairs(matching) do
    local found, leading = redis.pcall('SMISMEMBER', KEYS[w], unpack(part)), 0  -- an error has no first item: nothing held
    while found[leading + 1] == 1 do leading = leading + 1 end
    held[w] = held[w] + leading
    if leading == #part then still_matching[#still_matching + 1] = w end
  end
  first = first + #part
  matching = still_matching
end
return held
"""


class PrefixLookup:
    """Looks prefixes up. Never raises because of Redis, and never takes much longer than `deadline_s`."""

    def __init__(self, redis_url: str, keys: Keys, *, deadline_s: float = 0.05, retry_s: float = 0.25) -> None:
        self._redis = connect(redis_url)
        self._keys = keys
        self._refusals = Refusals()
        self._deadline_s = deadline_s
        self._retry_s = retry_s
        self._is_failing = False
        self._retry_at = 0.0
        self._tasks: set[asyncio.Task[object]] = set()

    async def longest_prefix(self, workers: Sequence[WorkerInfo], hashes: Sequence[bytes]) -> dict[WorkerId, int]:
        """By worker id, how many of the leading blocks each worker holds; {} if Redis does not answer in time.

        hashes: of the prompt's full blocks, in order (`shared.base.block_hash.block_hashes`). Where workers hold so much that the
        work would pass `MAX_CHECKS`, all that match so far get the same count, which is then a lower bound.
        """
        if not workers or not hashes:
            return {}
        asked = hashes[:MAX_CHECKS]
        keys = [self._keys.blocks(w.worker_id, w.boot_id) for w in workers]
        answer = await self._answer(_LONGEST_PREFIX, keys, b"".join(asked), CHUNK_BLOCKS, MAX_CHECKS)
        counts = self._checked(answer, lambda answer: read_counts(answer, len(workers), most=len(asked)))
        return {worker.worker_id: count for worker, count in zip(workers, counts, strict=True)} if counts else {}

    async def recent_holders(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Tags (`boot_tag`) of up to `MAX_HOLDERS` boots that stored late blocks of the prompt, the latest block's first. Ask their
        sets whether they hold them still."""
        if not hashes:
            return []
        answer = await self._answer(FIND_HOLDERS, [self._keys.holders], b"".join(probes(hashes)))
        return self._checked(answer, lambda answer: read_boot_tags(answer, most=MAX_HOLDERS)) or []

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    async def _answer(self, script: str, keys: Sequence[str], *values: bytes | int) -> object:
        """What the script returns; None if Redis does not answer in time."""
        if not self._may_try():
            return None
        try:
            with LOOKUP_SECONDS.time():
                answer = await self._within_deadline(self._redis.execute_command("EVAL", script, len(keys), *keys, *values))
        except REDIS_ERRORS as error:
            self._failed(error)
            return None
        self._is_failing = False
        return answer

    def _checked(self, answer: object, read: Callable[[object], list[T]]) -> list[T] | None:
        if answer is None:
            return None
        try:
            return read(answer)
        except InvalidEntry as refused:
            self._refusals.add("lookup", refused)
            return None

    async def _within_deadline(self, question: Coroutine[Any, Any, object]) -> object:
        """Leaves a late question to end by itself, which it does when its socket times out. Waiting for its cancellation, as
        `asyncio.timeout` does, can take as long: where asyncio.wait_for swallows a cancellation (Python < 3.12), it goes on."""
        task = asyncio.create_task(question)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait([task], timeout=self._deadline_s)
            if not task.done():
                raise TimeoutError(f"no answer within {self._deadline_s:g} s")
            return task.result()
        finally:
            task.cancel()

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a late failure has already been counted

    def _may_try(self) -> bool:
        """While failing, lets one lookup through each `retry_s`."""
        if not self._is_failing:
            return True
        now = time.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + self._retry_s
        return True

    def _failed(self, error: Exception) -> None:
        ERRORS.labels("lookup").inc()
        if not self._is_failing:
            log.warning("prefix lookups fail, routing goes by load: %s", describe(error))
        self._is_failing = True
        self._retry_at = time.monotonic() + self._retry_s
