"""Who is there, as far as this router has heard: pure state, with the time handed in.

A worker that has not been heard of for a TTL is dropped, but only on hearing *something* from Redis: a silent Redis says nothing
about workers. And after a silence, longer than Redis' own sign of life should take, everybody gets a full TTL to be heard again.
So neither a lost Redis, nor one that comes back empty, nor a stalled router, ever empties the view.
"""

from __future__ import annotations

from shared.base.worker_info import BootId, WorkerId, WorkerInfo


class FleetView:
    """Times are seconds of any monotonic clock."""

    def __init__(self, ttl_s: float, max_silence_s: float) -> None:
        self.workers: dict[WorkerId, WorkerInfo] = {}
        self.last_heard_at = float("-inf")  # anything from Redis
        self._ttl_s = ttl_s
        self._max_silence_s = max_silence_s
        self._expires_at: dict[WorkerId, float] = {}

    def heard(self, now: float) -> list[WorkerId]:
        """Redis has said something. Returns the ids of workers dropped because they have not been heard of for too long."""
        was_deaf = now - self.last_heard_at > self._max_silence_s
        self.last_heard_at = now
        if was_deaf:
            self._expires_at = dict.fromkeys(self.workers, now + self._ttl_s)
        expired = [worker_id for worker_id, at in self._expires_at.items() if at <= now]
        for worker_id in expired:
            self._drop(worker_id)
        return expired

    def update(self, info: WorkerInfo, now: float) -> None:
        """A heartbeat or an entry. One with another boot id replaces all that was known."""
        self.workers[info.worker_id] = info
        self._expires_at[info.worker_id] = now + self._ttl_s

    def say_goodbye(self, worker_id: WorkerId, boot_id: BootId) -> bool:
        """Drops the worker, unless another boot of it has been heard of since. True if it was there."""
        info = self.workers.get(worker_id)
        if info is None or info.boot_id != boot_id:
            return False
        self._drop(worker_id)
        return True

    def _drop(self, worker_id: WorkerId) -> None:
        del self.workers[worker_id], self._expires_at[worker_id]
