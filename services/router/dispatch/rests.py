"""Workers that failed lately. One that did rests for a moment before it is preferred again, longer
with each failure in a row.

Resting is a preference, never a ban: when all who could serve are resting, they are used. A
restarted worker has a new boot id and starts clean. The log has one line when a worker begins to
fail and one when it serves again, however many requests notice.
"""

from __future__ import annotations

import logging
import time

from shared.base.errors import TwostrokeError
from shared.base.worker_info import BootId, WorkerInfo

log = logging.getLogger(__name__)

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 5.0


class Rests:
    def __init__(self) -> None:
        self._rests: dict[BootId, tuple[float, float]] = {}  # of those whose last request failed: (until, length)

    def failed(self, worker: WorkerInfo, error: TwostrokeError) -> None:
        if worker.boot_id not in self._rests:
            log.warning("%s fails and rests: %s", worker.worker_id, error.message)
        _, length_s = self._rests.get(worker.boot_id, (0.0, _FIRST_REST_S / 2))
        length_s = min(2 * length_s, _LONGEST_REST_S)
        self._rests[worker.boot_id] = (time.monotonic() + length_s, length_s)

    def succeeded(self, worker: WorkerInfo) -> None:
        if self._rests.pop(worker.boot_id, None) is not None:
            log.info("%s serves again", worker.worker_id)

    def is_resting(self, worker: WorkerInfo) -> bool:
        rest = self._rests.get(worker.boot_id)
        return rest is not None and time.monotonic() < rest[0]

    def forget(self, boot_id: BootId) -> None:
        """A boot that is gone never comes back."""
        self._rests.pop(boot_id, None)
