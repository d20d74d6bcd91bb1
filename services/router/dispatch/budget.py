"""What is left of a request's time."""

from __future__ import annotations

import time


class Budget:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # that there were at the start
        self._ends_at = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())
