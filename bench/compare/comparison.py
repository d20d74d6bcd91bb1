"""The results of one sitting side by side: ours, the peers', and how ours stand to the best peer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.engines import Engine
from bench.load.measures import (
    COLD_TTFT,
    COMMON,
    ELAPSED,
    ITL_BEFORE_P50,
    ITL_P50,
    ITL_P99,
    LONG_TTFT,
    TTFT_P50,
    TTFT_P99,
    WARM_TTFT,
    WORST_GAP,
    Measure,
    Result,
)
from bench.load.report import Report, align, format_value

# What a workload is there to show. A workload not named here shows all common measures.
_HEADLINES = {
    "single": (TTFT_P50, ITL_P50),
    "poisson": (TTFT_P50, TTFT_P99, ITL_P50, ITL_P99),
    "prefix": (COLD_TTFT, WARM_TTFT),
    "pause": (ITL_BEFORE_P50, WORST_GAP, LONG_TTFT),
}
_DEFAULT_HEADLINES = tuple(measure for measure in COMMON if measure is not ELAPSED)


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine's part of the sitting: a report, or why there is none."""

    engine: Engine
    report: Report | None
    error: str = ""

    def result(self, workload: str) -> Result | None:
        results = self.report.results if self.report else ()
        return next((result for result in results if result.workload == workload), None)

    def value(self, workload: str, measure: Measure) -> float | None:
        result = self.result(workload)
        return result.values.get(measure) if result else None


@dataclass(frozen=True, slots=True)
class Standing:
    """One measure of one workload in all engines. `ratios` says how many times as good as the best peer each of ours is."""

    workload: str
    measure: Measure
    values: dict[str, float]
    best_peer: str  # empty if no peer has the measure
    ratios: dict[str, float]


def standings(entries: Sequence[Entry]) -> list[Standing]:
    """In the order of the workloads, without measures that nobody has."""
    workloads = dict.fromkeys(result.workload for entry in entries if entry.report for result in entry.report.results)
    every = [
        _standing(workload, measure, entries) for workload in workloads for measure in _HEADLINES.get(workload, _DEFAULT_HEADLINES)
    ]
    return [standing for standing in every if standing.values]


def _standing(workload: str, measure: Measure, entries: Sequence[Entry]) -> Standing:
    values = {entry.engine.name: value for entry in entries if (value := entry.value(workload, measure)) is not None}
    ours = [entry.engine.name for entry in entries if entry.engine.is_ours and entry.engine.name in values]
    peers = [name for name in values if name not in ours]
    if not peers:
        return Standing(workload, measure, values, "", {})
    best = max(peers, key=lambda name: _goodness(measure, values[name]))
    ratios = {name: _goodness(measure, values[name]) / _goodness(measure, values[best]) for name in ours}
    return Standing(workload, measure, values, best, ratios)


def _goodness(measure: Measure, value: float) -> float:
    """Twice as much is twice as good."""
    return value if measure.is_better_high else 1 / max(value, 1e-9)


def comparison_table(entries: Sequence[Entry]) -> str:
    """A line per measure, a column per engine. `(1.20x)` means 1.2 times as good as the best peer."""
    names = [entry.engine.name for entry in entries]
    rows = [["", *names, "best peer"]]
    for standing in standings(entries):
        cells = [_cell(standing, name) for name in names]
        rows.append([f"{standing.workload}: {standing.measure.label}", *cells, standing.best_peer or "-"])
    return "\n".join([*align(rows), *_notes(entries)])


def _cell(standing: Standing, name: str) -> str:
    text = format_value(standing.measure, standing.values.get(name))
    return f"{text} ({standing.ratios[name]:.2f}x)" if name in standing.ratios else text


def _notes(entries: Sequence[Entry]) -> list[str]:
    notes = [f"{entry.engine.name}: {entry.error}" for entry in entries if entry.error]
    for entry in entries:
        for result in entry.report.results if entry.report else ():
            if result.num_failed:
                failed = f"{result.num_failed} of {result.num_requests} requests failed: {result.first_error}"
                notes.append(f"{entry.engine.name}, {result.workload}: {failed}")
    return ["", *notes] if notes else []


def comparison_json(entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "engines": [
            {
                "name": entry.engine.name,
                "command": list(entry.engine.command),
                "error": entry.error or None,
                "report": entry.report.to_json() if entry.report else None,
            }
            for entry in entries
        ],
        "standings": [
            {
                "workload": standing.workload,
                "measure": standing.measure.key,
                "values": standing.values,
                "best_peer": standing.best_peer or None,
                "times_as_good_as_best_peer": standing.ratios,
            }
            for standing in standings(entries)
        ],
    }
