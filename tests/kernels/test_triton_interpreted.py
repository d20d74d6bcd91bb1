"""Runs `triton_cases/` in Triton's interpreter. It must be chosen before Triton is imported, hence processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # half a minute to one on two idle cores; several on busy ones

CASES = Path(__file__).parent / "triton_cases"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All files at once: each is one thread."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = {
        path.name: subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for path in sorted(CASES.glob("*_cases.py"))
    }
    yield started
    for process in started.values():  # any that no test waited for
        with process:
            process.kill()


@pytest.mark.parametrize("name", ["attention_cases.py", "elementwise_cases.py", "sampling_cases.py"])
def test_kernels_match_the_reference_in_the_interpreter(runs: dict[str, subprocess.Popen[str]], name: str) -> None:
    output, _ = runs[name].communicate()
    assert runs[name].returncode == 0, f"{name} failed:\n{output}"
    assert " passed" in output


def test_no_file_of_cases_is_forgotten(runs: dict[str, subprocess.Popen[str]]) -> None:
    assert sorted(runs) == ["attention_cases.py", "elementwise_cases.py", "sampling_cases.py"]
