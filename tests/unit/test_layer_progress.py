"""What is reported of a step before its end: only layers whose KV is there, only of prompts to be shipped, and not too often."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from shared.engine.compute import layer_progress as module
from shared.engine.compute.layer_progress import layer_progress
from shared.engine.schedule.plan import Event, Plan, Progress, ScheduledSequence
from shared.engine.schedule.sequence import Sequence as EngineSequence
from tests.support.cluster import prompt_of, request
from tests.support.engine import VOCAB_SIZE, make_sequence, make_tiny_model, schedule, tiny_runner


def scheduled(num_tokens: int, hold: bool) -> ScheduledSequence:
    return ScheduledSequence(EngineSequence(request(prompt_of(40)), hold=hold), 0, num_tokens, 0)


class TestReports:
    def report(self, plan: Plan, times_s: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[Event]:
        """`times_s`: of the step's begin and of each layer's end."""
        clock = iter(times_s)
        monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
        events: list[Event] = []
        report = layer_progress(plan, events.extend)
        assert report is not None
        for layer in range(1, len(times_s)):
            report(layer)
        return events

    def test_layers_that_follow_closely_are_reported_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = scheduled(30, hold=True)
        events = self.report(Plan((held,)), [0.0, 0.001, 0.006, 0.008, 0.012], monkeypatch)
        assert events == [Progress(held.sequence.id, 30, 2), Progress(held.sequence.id, 30, 4)]

    def test_only_prompts_to_be_shipped_are_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held = scheduled(30, hold=True)
        plan = Plan((scheduled(1, hold=True), scheduled(1, hold=False), scheduled(30, hold=False), held))
        assert self.report(plan, [0.0, 1.0], monkeypatch) == [Progress(held.sequence.id, 30, 1)]

    def test_a_step_without_one_is_not_watched(self) -> None:
        assert layer_progress(Plan((scheduled(1, hold=True), scheduled(30, hold=False))), lambda events: None) is None


def test_when_a_layer_is_reported_its_kv_is_what_it_will_be_and_the_next_ones_is_not_there(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    runner = tiny_runner(tmp_path, num_blocks=17)
    sequence = make_sequence([t % VOCAB_SIZE for t in prompt_of(40)], 1, 4)
    seen: list[torch.Tensor] = []
    runner.launch(Plan((schedule(sequence, 40),)), lambda num_layers: seen.append(runner.pool.kv[1:4].clone()))
    final = runner.pool.kv[1:4]
    assert len(seen) == runner.pool.geometry.num_layers
    for index, kv in enumerate(seen):
        assert torch.equal(kv[:, : index + 1], final[:, : index + 1])
        assert not torch.equal(kv[:, index + 1 :], final[:, index + 1 :]) or index + 1 == len(seen)
