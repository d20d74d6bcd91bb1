"""What a launch hands over to a fake device: nothing that the engine or the scheduler does before it is computed changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.schedule.plan import Plan, SampledToken, ScheduledSequence


@dataclass(frozen=True)
class Work:
    item: ScheduledSequence
    block_table: list[int]
    token_ids: list[int]  # those known at the launch
    is_forking: bool


@dataclass(frozen=True)
class Launched:
    plan: Plan
    works: list[Work]

    @classmethod
    def of(cls, plan: Plan) -> Launched:
        works = []
        for item in plan.scheduled:
            sequence = item.sequence
            works.append(Work(item, sequence.block_table.copy(), sequence.token_ids[: item.end], sequence.is_forking))
        return cls(plan, works)

    def take(self, sampled: Sequence[Sequence[SampledToken]]) -> None:
        """A plan made ahead gets the tokens that the step before it has sampled."""
        if self.plan.sampled_rows is None:
            return
        for work, row in zip(self.works, self.plan.sampled_rows, strict=True):
            (token,) = sampled[row]
            assert len(work.token_ids) == work.item.start, "a token that is to come from the step before is known"
            work.token_ids.append(token.token_id)
