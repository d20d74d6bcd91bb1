"""The watchdog tells a step that hangs from one that is merely long."""

from __future__ import annotations

import threading

from shared.engine.watchdog import Watchdog


class Stuck:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def __call__(self, elapsed_s: float) -> None:
        self.happened.set()


def test_step_that_does_not_end_is_noticed_within_about_two_seconds() -> None:
    stuck = Stuck()
    watchdog = Watchdog(stuck)
    watchdog.end(num_tokens=8, step_s=0.02)
    watchdog.start()
    watchdog.begin(num_tokens=8)
    assert stuck.happened.wait(timeout=10)
    watchdog.stop()


def test_long_prompt_is_given_the_time_that_its_tokens_need() -> None:
    stuck = Stuck()
    watchdog = Watchdog(stuck)
    watchdog.end(num_tokens=1, step_s=0.02)
    watchdog.start()
    watchdog.begin(num_tokens=2000)  # forty seconds' worth
    assert not stuck.happened.wait(timeout=3)
    watchdog.end(num_tokens=2000, step_s=3)
    watchdog.stop()


def test_idle_engine_is_never_stuck() -> None:
    stuck = Stuck()
    watchdog = Watchdog(stuck)
    watchdog.start()
    watchdog.begin(num_tokens=1)
    watchdog.end(num_tokens=1, step_s=0.01)
    assert not stuck.happened.wait(timeout=2.5)
    watchdog.stop()
