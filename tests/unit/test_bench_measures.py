"""Figures follow from arrival times; expected values are worked out by hand or by the statistics module."""

from __future__ import annotations

import statistics

import pytest

from bench.load.client import Completion
from bench.load.measures import (
    ELAPSED,
    ITL_MAX,
    ITL_P50,
    ITL_P99,
    OUTPUT_TOKENS_PER_S,
    TTFT_P50,
    TTFT_P99,
    Run,
    common_values,
    percentile,
    summarize,
)


def completion(sent_at: float, *arrived_at: float, error: str = "", num_reported_tokens: int | None = None) -> Completion:
    return Completion(8, 4, sent_at, list(arrived_at), num_reported_tokens, error)


def test_values_are_those_of_the_arrivals():
    run = Run([completion(10.0, 10.5, 10.6, 10.9), completion(10.0, 11.5, 11.7)], elapsed_s=2.0)
    values = common_values(run)
    assert values[TTFT_P50] == pytest.approx(1.0)
    assert values[TTFT_P99] == pytest.approx(0.5 + 0.99 * 1.0)
    assert values[ITL_P50] == pytest.approx(0.2)  # of 0.1, 0.3, 0.2
    assert values[ITL_MAX] == pytest.approx(0.3)
    assert values[OUTPUT_TOKENS_PER_S] == pytest.approx(5 / 2.0)
    assert values[ELAPSED] == 2.0


def test_percentiles_interpolate_as_the_statistics_module_does():
    values = [0.3, 0.1, 0.9, 0.4, 0.2, 0.8, 0.7]
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, q) for q in (1, 50, 99)] == pytest.approx([hundredths[0], hundredths[49], hundredths[98]])


def test_the_servers_own_token_count_goes_before_the_number_of_chunks():
    run = Run([completion(0.0, 1.0, 2.0, num_reported_tokens=7)], elapsed_s=2.0)
    assert common_values(run)[OUTPUT_TOKENS_PER_S] == 3.5


def test_one_chunk_has_no_inter_token_latency():
    assert ITL_P99 not in common_values(Run([completion(0.0, 1.0)], elapsed_s=1.0))


def test_failed_requests_are_counted_and_otherwise_left_out():
    failed = completion(0.0, 9.0, error="HTTP 500: oops")
    result = summarize("mixed", [Run([completion(0.0, 1.0), failed], 1.0), Run([completion(0.0, 3.0)], 1.0, companions=[failed])])
    assert (result.num_runs, result.num_requests, result.num_failed) == (2, 4, 2)
    assert result.first_error == "HTTP 500: oops"
    assert result.values[TTFT_P50] == 2.0


def test_the_median_over_runs_is_taken_of_each_measure():
    result = summarize("single", [Run([completion(0.0, ttft_s)], 1.0) for ttft_s in (5.0, 1.0, 2.0)])
    assert result.values[TTFT_P50] == 2.0


def test_runs_of_failures_only_have_no_values():
    result = summarize("single", [Run([completion(0.0, error="refused")], 1.0)])
    assert result.values == {}
    assert result.num_failed == 1
