"""What an engine tells Prometheus: about each step, and how it stands after each change."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from shared.engine.schedule.plan import Plan
from shared.engine.schedule.scheduler import Scheduler
from shared.process.telemetry import LATENCY_BUCKETS_S

step_seconds = Histogram("twostroke_step_seconds", "Whole engine steps", buckets=LATENCY_BUCKETS_S)
step_overhead_seconds = Histogram(
    "twostroke_step_overhead_seconds",
    "Engine steps less the model's execution: time in which the device has nothing to do",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
step_failures = Counter("twostroke_step_failures_total", "Engine steps that raised")
scheduled_tokens = Counter("twostroke_scheduled_tokens_total", "Tokens computed, by kind", ["kind"])
preemptions = Counter("twostroke_preemptions_total", "Sequences whose blocks were taken for older ones")
running = Gauge("twostroke_running_sequences", "Sequences that hold a seat")
waiting = Gauge("twostroke_waiting_sequences", "Sequences in line for blocks or a seat")
kv_usage = Gauge("twostroke_kv_usage_ratio", "Share of KV blocks that live sequences refer to")


@dataclass(frozen=True, slots=True)
class StepTimes:
    whole_s: float  # with what the engine did for the step while the device had nothing else to do
    execution_s: float  # from its launch, or the end of the step before it, to its end
    idle_s: float  # at the end of that, the device had done the step and the engine had not asked yet

    @property
    def overhead_s(self) -> float:
        return max(0.0, self.whole_s - (self.execution_s - self.idle_s))


def observe_step(plan: Plan, times: StepTimes, num_preempted: int) -> None:
    step_seconds.observe(times.whole_s)
    step_overhead_seconds.observe(times.overhead_s)
    preemptions.inc(num_preempted)
    decodes = sum(1 for s in plan.scheduled if s.num_tokens == 1)
    scheduled_tokens.labels("decode").inc(decodes)
    scheduled_tokens.labels("prefill").inc(plan.num_tokens - decodes)


def observe_state(scheduler: Scheduler) -> None:
    """To be called after every change: the engine of an idle worker makes no steps, and its gauges are read all the same."""
    running.set(scheduler.num_running)
    waiting.set(scheduler.num_waiting)
    blocks = scheduler.blocks
    kv_usage.set(1 - blocks.num_free_blocks / blocks.num_usable_blocks)
