"""Notices a step that does not end: a device or a driver that hangs leaves the process alive and its connections open.

What is too long depends on the step. The time of earlier steps, and of their tokens, predicts it; a step is stuck when it has
lasted twenty times that and at least two seconds. Time is counted in ticks of this thread, so that a process that was itself
stopped for a while is not taken for one that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_TICK_S = 0.25
_FACTOR = 20.0
_LEAST_S = 2.0
_UNKNOWN_S = 120.0  # before the first step has been measured


class Watchdog:
    """`begin` and `end` are called by the engine around each step, `on_stuck` once, from the watchdog's thread."""

    def __init__(self, on_stuck: Callable[[float], None]) -> None:
        self._on_stuck = on_stuck
        self._step_s = 0.0  # moving average of whole steps
        self._token_s = 0.0  # moving average of a step's time divided by its tokens
        self._limit_s: float | None = None  # of the step under way
        self._num_begun = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self, num_tokens: int) -> None:
        expected_s = max(self._step_s, self._token_s * num_tokens)
        self._limit_s = max(_LEAST_S, _FACTOR * expected_s) if self._step_s else _UNKNOWN_S
        self._num_begun += 1

    def end(self, num_tokens: int, step_s: float) -> None:
        self._limit_s = None
        self._step_s = _average(self._step_s, step_s)
        self._token_s = _average(self._token_s, step_s / num_tokens)

    def _run(self) -> None:
        seen, elapsed_s = 0, 0.0
        while not self._stop.wait(_TICK_S):
            limit_s = self._limit_s
            if limit_s is None or self._num_begun != seen:
                seen, elapsed_s = self._num_begun, 0.0
                continue
            elapsed_s += _TICK_S
            if elapsed_s >= limit_s:
                self._on_stuck(elapsed_s)
                return


def _average(before: float, now: float) -> float:
    return 0.9 * before + 0.1 * now if before else now
