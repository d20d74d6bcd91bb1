"""What a benchmark found, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.load.measures import COMMON, ELAPSED, Measure, Result
from shared.base.errors import ConfigError
from shared.base.version import VERSION

_MISSING = "-"
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What the load generator itself took; its cores are often the server's too."""

    cpu_s: float
    elapsed_s: float
    num_chunks: int

    @property
    def cpu_us_per_chunk(self) -> float:
        return self.cpu_s * _US_PER_S / max(1, self.num_chunks)

    @property
    def share_of_a_core(self) -> float:
        return self.cpu_s / self.elapsed_s


@dataclass(frozen=True, slots=True)
class Report:
    url: str
    model: str
    seed: int
    started_at: str  # ISO 8601
    results: Sequence[Result]
    client: ClientCost

    @property
    def num_failed(self) -> int:
        return sum(result.num_failed for result in self.results)

    def to_json(self) -> dict[str, Any]:
        return {
            "twostroke_version": VERSION,
            "url": self.url,
            "model": self.model,
            "seed": self.seed,
            "started_at": self.started_at,
            "client_cpu_us_per_chunk": self.client.cpu_us_per_chunk,
            "client_share_of_a_core": self.client.share_of_a_core,
            "workloads": [_result_json(result) for result in self.results],
        }

    def table(self) -> str:
        """A line per workload, and below it what only this workload measures and its first error."""
        shown = [measure for measure in COMMON if measure is not ELAPSED]
        header = ["workload", "runs", "requests", "failed", *(measure.label for measure in shown), ELAPSED.label]
        rows = [_row(result, (*shown, ELAPSED)) for result in self.results]
        lines = align([header, *rows])
        body = [line for result, line in zip(self.results, lines[1:], strict=True) for line in [line, *_details(result)]]
        client = f"client: {self.client.cpu_us_per_chunk:.0f} us of CPU per chunk, {self.client.share_of_a_core:.1%} of a core"
        return "\n".join([f"{self.model} at {self.url}, seed {self.seed}", "", lines[0], *body, "", client])


def format_value(measure: Measure, value: float | None) -> str:
    """With a unit that suits its size: 12.3 ms, 4.56 s."""
    if value is None:
        return _MISSING
    if not measure.is_time:
        return f"{value:,.1f}"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def write_json(path: Path, content: object) -> None:
    """Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _row(result: Result, measures: Sequence[Measure]) -> list[str]:
    counts = [str(count) for count in (result.num_runs, result.num_requests, result.num_failed)]
    return [result.workload, *counts, *(format_value(measure, result.values.get(measure)) for measure in measures)]


def _details(result: Result) -> list[str]:
    own = [f"{measure.label} {format_value(measure, value)}" for measure, value in result.values.items() if measure not in COMMON]
    lines = ["  " + ", ".join(own)] if own else []
    return [*lines, f"  first error: {result.first_error}"] if result.num_failed else lines


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "workload": result.workload,
        "runs": result.num_runs,
        "requests": result.num_requests,
        "failed": result.num_failed,
        "first_error": result.first_error or None,
        **{measure.key: value for measure, value in result.values.items()},
    }
