"""Who is there, as far as this router has heard: pure state, with the time handed in.

    heartbeat ─> fresh ─(stale_after_s)─> stale: alive perhaps, but its process makes no progress ─(ttl_s)─> dropped

Time passes for workers only while Redis speaks: a silent Redis says nothing about them. And after a silence longer than Redis' own
sign of life should take, everybody starts fresh. So neither a lost Redis, nor one that comes back empty, nor a stalled router, ever
empties the view or makes all workers look stuck.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from shared.base.worker_info import BootId, WorkerId, WorkerInfo

MAX_WORKERS = 10_000  # more than these are not kept, whatever Redis says


class FleetView:
    """Times are seconds of any monotonic clock."""

    def __init__(self, ttl_s: float, max_silence_s: float, stale_after_s: float) -> None:
        self.workers: dict[WorkerId, WorkerInfo] = {}
        self.last_heard_at = float("-inf")  # anything from Redis
        self._ttl_s = ttl_s
        self._max_silence_s = max_silence_s
        self._stale_after_s = stale_after_s
        self._heartbeat_at: dict[WorkerId, float] = {}  # the longest silent first

    def heard(self, now: float) -> list[WorkerId]:
        """Redis has said something. Returns the ids of workers dropped because they have not been heard of for too long."""
        was_deaf = now - self.last_heard_at > self._max_silence_s
        self.last_heard_at = now
        if was_deaf:
            self._heartbeat_at = dict.fromkeys(self.workers, now)
        expired = list(self._silent_for(self._ttl_s))
        for worker_id in expired:
            self._drop(worker_id)
        return expired

    def update(self, info: WorkerInfo, now: float) -> bool:
        """A heartbeat or an entry. One with another boot id replaces all that was known. False if there are too many workers."""
        if info.worker_id not in self.workers and len(self.workers) >= MAX_WORKERS:
            return False
        self.workers[info.worker_id] = info
        self._heartbeat_at.pop(info.worker_id, None)  # to the end
        self._heartbeat_at[info.worker_id] = now
        return True

    def say_goodbye(self, worker_id: WorkerId, boot_id: BootId) -> bool:
        """Drops the worker, unless another boot of it has been heard of since. True if it was there."""
        info = self.workers.get(worker_id)
        if info is None or info.boot_id != boot_id:
            return False
        self._drop(worker_id)
        return True

    def is_stale(self, worker_id: WorkerId) -> bool:
        """Whether the worker's heartbeats are overdue: its process is stuck, or it has lost Redis."""
        return self.last_heard_at - self._heartbeat_at.get(worker_id, self.last_heard_at) >= self._stale_after_s

    @property
    def num_stale(self) -> int:
        return sum(1 for _ in self._silent_for(self._stale_after_s))

    def _silent_for(self, at_least_s: float) -> Iterator[WorkerId]:
        return takewhile(lambda w: self.last_heard_at - self._heartbeat_at[w] >= at_least_s, self._heartbeat_at)

    def _drop(self, worker_id: WorkerId) -> None:
        del self.workers[worker_id], self._heartbeat_at[worker_id]
