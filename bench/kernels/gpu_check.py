"""`python -m bench.kernels.gpu_check`: what tests on machines without a GPU cannot say. Needs one GPU, no network, 8 minutes.

1. The kernel tests and a tiny model end to end, for real (`tests/kernels/triton_cases`, `tests/gpu`).
2. Attention, block copies, a whole decode step and the engine's loop around it, timed against what the device can do.
3. KV blocks from one process to another on this GPU.

Each section is tried by itself; what fails is recorded, and the exit code is 1. Without a GPU: one line, exit code 2.
Writes bench/reports/gpu-<device>.json and the table between the marks in docs/performance.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from bench.handoff import transports
from bench.kernels import gpu_decode_step, gpu_engine, gpu_kernels, gpu_timing
from bench.kernels.gpu_kernels import Rows

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "bench" / "reports"
DOCUMENT = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"
TEST_FILES = ("tests/kernels/triton_cases/*_cases.py", "tests/gpu/*_cases.py")
TESTS_TIMEOUT_S = 300.0
LINES_OF_A_FAILURE = 60
MIB_OF_A_TRANSFER = 256  # 2048 tokens of Llama 3 8B's shape


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: Rows
    error: str | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Report:
    device: str
    capability: str
    torch_version: str
    triton_version: str
    day: str  # ISO 8601, UTC
    sections: list[Section] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return sum(section.error is not None for section in self.sections)


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu-check: no GPU here (torch.cuda.is_available() is false)", file=sys.stderr)
        return 2
    report = run()
    path = write_json(report)
    write_document(report)
    print(tables(report))
    print(f"\n{path.relative_to(ROOT)} and {DOCUMENT.relative_to(ROOT)} written; {report.num_failed} sections failed")
    return 1 if report.num_failed else 0


def run() -> Report:
    major, minor = torch.cuda.get_device_capability()
    report = Report(
        torch.cuda.get_device_name(),
        f"{major}.{minor}",
        torch.__version__,
        triton.__version__,
        time.strftime("%Y-%m-%d", time.gmtime()),
    )
    report.sections.append(_section("Tests on the device", run_tests))
    copy_rates: list[float] = []

    def measure_copy() -> Rows:
        copy_rates.append(gpu_timing.copy_bytes_per_s())
        return [{"GB/s": copy_rates[0] / 1e9}]

    report.sections.append(_section("Device copy, read and written", measure_copy))
    measured: list[tuple[str, Callable[[], Rows]]] = [
        ("Decode attention, 32/8 heads of 128, bfloat16", lambda: gpu_kernels.decode_attention(copy_rates[0])),
        ("Prefill attention, 32/8 heads of 128, bfloat16", gpu_kernels.prefill_attention),
        ("Block gather and scatter, 2 MiB blocks", lambda: gpu_kernels.block_copies(copy_rates[0])),
        ("Decode step, Llama 3 8B's shape, bfloat16, CUDA graph", lambda: gpu_decode_step.decode_steps(copy_rates[0])),
        ("Engine loop around that step, with the next one launched ahead and not", gpu_engine.engine_steps),
        ("KV blocks between two processes on this GPU, GB/s", measure_transports),
    ]
    report.sections.extend(_section(title, work) for title, work in measured)
    return report


def measure_transports() -> Rows:
    speeds = asyncio.run(transports.measure(transports.TransportsConfig(mib=MIB_OF_A_TRANSFER, device="cuda")))
    return [{speed.way: speed.gb_per_s for speed in speeds}]


def _section(title: str, work: Callable[[], Rows]) -> Section:
    print(f"gpu-check: {title} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    rows: Rows = []
    error = None
    try:
        rows = work()
    except Exception:  # whatever it is belongs in the report, and the other sections still count
        error = traceback.format_exc()
        print(error, file=sys.stderr)
    torch.cuda.empty_cache()
    return Section(title, rows, error, time.monotonic() - start)


def run_tests() -> Rows:
    """The kernel tests and the end-to-end tests in one pytest process. Raises RuntimeError if any fails."""
    files = [str(path) for pattern in TEST_FILES for path in sorted(ROOT.glob(pattern))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TESTS_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-LINES_OF_A_FAILURE:]))
    counted = re.search(r"(\d+) passed", done.stdout)
    return [{"passed": int(counted[1]) if counted else 0}]


def write_json(report: Report) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", report.device.lower()).strip("-")
    path = REPORTS / f"gpu-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return path


def write_document(report: Report) -> None:
    """Replaces what is between the marks, or appends a section with them."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else "# Performance\n"
    if BEGIN not in text:
        text += f"\n## On a GPU\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{tables(report)}\n{END}{after}")


def tables(report: Report) -> str:
    """Markdown."""
    made_on = f"{report.device}, torch {report.torch_version}, Triton {report.triton_version}, {report.day}"
    lines = [f"{made_on}: `python -m bench.kernels.gpu_check`."]
    for section in report.sections:
        lines += ["", f"**{section.title}**", ""]
        if section.error is not None:
            lines.append(f"failed: `{section.error.strip().splitlines()[-1]}`")
        elif section.rows:
            columns = list(section.rows[0])
            lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
            lines += ["| " + " | ".join(_number(row[column]) for column in columns) + " |" for row in section.rows]
    return "\n".join(lines)


def _number(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
