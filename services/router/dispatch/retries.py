"""What has failed since a request's last new token, and so where it may go next, when, and for how
long.

It goes to workers that it has not tried at once, up to some number; after that, and whenever it has
tried all, at growing intervals. So many requests that wait for one fleet ask it for little.
"""

from __future__ import annotations

import time

from services.router.dispatch.budget import Budget
from services.router.dispatch.legs import LegFailed
from shared.base.worker_info import BootId
from shared.index.connection import Backoff

_MAX_FAILURES = 5  # of workers that had taken the request on: it may be what kills them
_MAX_AT_ONCE = 8
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class Retries:
    def __init__(self, budget: Budget, worker_wait_s: float) -> None:
        self.exclude: set[BootId] = set()  # decode workers tried in this round
        self.may_hand_off = True
        self._budget = budget
        self._worker_wait_s = worker_wait_s
        self._num_reached = 0
        self._num_at_once = 0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._give_up_at = time.monotonic() + worker_wait_s

    def note(self, failed: LegFailed) -> None:
        if failed.reached:
            self._num_reached += 1
            self._give_up_at = time.monotonic() + self._worker_wait_s  # one that died is usually back soon
        if failed.leg == "prefill":
            self.may_hand_off = False
        else:
            self.exclude.add(failed.worker.boot_id)
            self._num_at_once += 1

    @property
    def are_used_up(self) -> bool:
        return self._num_reached >= _MAX_FAILURES or self.is_time_up

    @property
    def is_time_up(self) -> bool:
        return self._left_s == 0.0

    @property
    def must_pause(self) -> bool:
        return self._num_at_once >= _MAX_AT_ONCE

    def next_pause_s(self) -> float:
        """Not longer than it makes sense to wait at all."""
        return min(self._backoff.next_delay_s(), self._left_s)

    def begin_round(self) -> None:
        """Those that were tried may be tried again."""
        self.exclude.clear()

    @property
    def _left_s(self) -> float:
        return max(0.0, min(self._budget.left_s, self._give_up_at - time.monotonic()))
