"""What a step has computed before it ends: prompts that are shipped need not wait for their last layer.

    layer 1 ─ layer 2 ─ … ─ layer L        on the engine's thread
       └──────── every few milliseconds ──> Progress(prompt, tokens, layers so far) ──> who ships its blocks

How much is sent at once settles itself: whoever ships takes all layers that have been reported since it last looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shared.engine.schedule.plan import Event, Plan, Progress, ScheduledSequence

_INTERVAL_S = 0.005  # a report wakes another thread, which takes the interpreter from this one


class LayerProgress:
    """Called after each layer with how many are done."""

    def __init__(self, plan: Plan, listener: Callable[[Sequence[Event]], None]) -> None:
        self._prompts = _prompts(plan)
        self._listener = listener
        self._reported_s = time.perf_counter()

    def __call__(self, num_layers: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._reported_s < _INTERVAL_S:
            return
        self._reported_s = now_s
        self._listener([Progress(s.sequence.id, s.end, num_layers) for s in self._prompts])


def layer_progress(plan: Plan, listener: Callable[[Sequence[Event]], None]) -> LayerProgress | None:
    """None if the step computes no prompt that is to be shipped."""
    return LayerProgress(plan, listener) if _prompts(plan) else None


def _prompts(plan: Plan) -> list[ScheduledSequence]:
    """Those of single tokens have nothing worth mentioning, and if the step fails they may get other blocks."""
    return [item for item in plan.scheduled if item.sequence.hold and item.num_tokens > 1]
