"""What is measured, and how it follows from the completions of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.load.client import Completion


@dataclass(frozen=True, slots=True)
class Measure:
    """`key` names it in JSON, with its unit; `label` in a table."""

    key: str
    label: str
    is_better_high: bool = False

    @property
    def is_time(self) -> bool:
        return self.key.endswith("_s") and not self.key.endswith("_per_s")


OUTPUT_TOKENS_PER_S = Measure("output_tokens_per_s", "output tokens/s", is_better_high=True)
TTFT_P50 = Measure("ttft_p50_s", "TTFT p50")
TTFT_P99 = Measure("ttft_p99_s", "TTFT p99")
ITL_P50 = Measure("itl_p50_s", "ITL p50")
ITL_P99 = Measure("itl_p99_s", "ITL p99")
ITL_MAX = Measure("itl_max_s", "ITL max")
ELAPSED = Measure("elapsed_s", "elapsed")
COLD_TTFT = Measure("cold_ttft_s", "cold TTFT")
WARM_TTFT = Measure("warm_ttft_p50_s", "warm TTFT p50")
COLD_OVER_WARM = Measure("cold_over_warm", "cold / warm", is_better_high=True)
ITL_BEFORE_P50 = Measure("itl_before_p50_s", "ITL before, p50")
ITL_BEFORE_P99 = Measure("itl_before_p99_s", "ITL before, p99")
WORST_GAP = Measure("worst_gap_s", "worst gap")
GAP_OVER_ITL = Measure("worst_gap_over_itl_before_p99", "worst gap / ITL before p99")
LONG_TTFT = Measure("long_prompt_ttft_s", "long prompt's TTFT")

# Of every workload; the others belong to one.
COMMON = (OUTPUT_TOKENS_PER_S, TTFT_P50, TTFT_P99, ITL_P50, ITL_P99, ITL_MAX, ELAPSED)

Values = Mapping[Measure, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload. `own` are the workload's own measures; `companions` are requests that have only those."""

    completions: Sequence[Completion]
    elapsed_s: float
    own: Values = field(default_factory=dict)
    companions: Sequence[Completion] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of a workload: counts in all, and the median over the runs of each measure."""

    workload: str
    num_runs: int
    num_requests: int
    num_failed: int
    first_error: str
    values: Values


def summarize(workload: str, runs: Sequence[Run]) -> Result:
    """A measure that a run lacks, for its requests failed, is the median of the other runs, or absent."""
    completions = [completion for run in runs for completion in (*run.completions, *run.companions)]
    failed = [completion for completion in completions if not completion.is_good]
    per_run = [{**common_values(run), **run.own} for run in runs]
    measures = dict.fromkeys(measure for values in per_run for measure in values)
    return Result(
        workload,
        len(runs),
        len(completions),
        len(failed),
        next((completion.error for completion in failed), ""),
        {measure: statistics.median(values[measure] for values in per_run if measure in values) for measure in measures},
    )


def common_values(run: Run) -> dict[Measure, float]:
    """Of the requests that did not fail."""
    good = [completion for completion in run.completions if completion.is_good]
    if not good:
        return {}
    ttfts_s = [completion.ttft_s for completion in good]
    values = {
        OUTPUT_TOKENS_PER_S: sum(completion.num_output_tokens for completion in good) / run.elapsed_s,
        TTFT_P50: percentile(ttfts_s, 50),
        TTFT_P99: percentile(ttfts_s, 99),
        ELAPSED: run.elapsed_s,
    }
    if gaps_s := [gap for completion in good for gap in completion.gaps_s]:
        values |= {ITL_P50: percentile(gaps_s, 50), ITL_P99: percentile(gaps_s, 99), ITL_MAX: max(gaps_s)}
    return values


def percentile(values: Iterable[float], q: float) -> float:
    """With linear interpolation between the two nearest ranks."""
    return float(np.percentile(np.fromiter(values, dtype=np.float64), q))
