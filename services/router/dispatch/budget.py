"""What is left of a request's time."""

from __future__ import annotations

import time

_GRACE_S = 1.0


class Budget:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # that there were at the start
        self._ends_at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def call_timeout_s(self) -> float:
        """Of a call to a worker. The router ends its calls itself when the time is up; a worker that did
        so a moment earlier would look as if it had failed."""
        return self.left_s + _GRACE_S
