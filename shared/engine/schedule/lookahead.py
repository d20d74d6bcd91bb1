"""The step after the one in flight, planned before that one has sampled.

    device    step N ........................ | step N + 1 ................... |
    CPU       launch N + 1 ... wait for N ....... N's tokens go out, launch N + 2 ... wait for N + 1

A step need not know its tokens to be launched, only which sequences it has, where they are and which blocks they may use: the
tokens can go from one step to the next on the device. So the next step is planned ahead where each sequence of the step in flight
samples one token and then, whatever that is, just computes it:

- a sequence whose last token this is, by its limits, is left out; one that may end by its token is taken along, and what it
  computes and samples in vain is thrown away;
- a sequence that forks, is held, has more of its prompt to compute, or whose logits depend on the value of its last token
  (penalties), makes the next step wait.

The scheduler decides whether it has something better to do with the next step.
"""

from __future__ import annotations

from shared.base.request import is_last
from shared.engine.schedule.plan import Plan, ScheduledSequence
from shared.engine.schedule.sequence import Status


def plan_ahead(plan: Plan, max_model_len: int) -> Plan | None:
    """The continuation of a plan that is in flight; None if it cannot be planned yet, or if nothing is left to continue."""
    rows, scheduled = [], []
    for row, item in enumerate(plan.scheduled):
        if not _is_simple(item):
            return None
        if item.sequence.status is Status.RUNNING and not _ends(item, max_model_len):
            rows.append(row)
            scheduled.append(ScheduledSequence(item.sequence, item.end, num_tokens=1, num_samples=1))
    return Plan(tuple(scheduled), sampled_rows=tuple(rows)) if scheduled else None


def _is_simple(item: ScheduledSequence) -> bool:
    return item.num_samples == 1 and not item.sequence.hold and not item.sequence.request.sampling.has_penalties


def _ends(item: ScheduledSequence, max_model_len: int) -> bool:
    """Whether the token that the step samples is the sequence's last one, whatever it is."""
    return item.end + 1 >= max_model_len or is_last(item.sequence.request.sampling, item.sample_index)
