"""The CPU kernels as they are compiled for a processor that is neither AVX2 nor AVX-512: other vectors, other tiles.

Chunks of bfloat16 go the way of CPUs that multiply it natively, with that instruction in plain lanes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("attention", "blocks", "elementwise", "linear", "rope", "sampling")
RUN = """
import sys, pytest, torch
assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.timeout(900)
def test_they_pass_the_same_tests_without_avx() -> None:
    tests = [str(HERE / f"test_cpu_{name}.py") for name in FILES]
    command = [sys.executable, "-c", RUN, "-q", "-x", "-p", "no:cacheprovider", "-o", "timeout=600", *tests]
    environ = os.environ | {"ATEN_CPU_CAPABILITY": "default", "CXXFLAGS": "-DTWOSTROKE_PAIRS"}
    run = subprocess.run(command, env=environ, cwd=HERE.parents[1], capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
