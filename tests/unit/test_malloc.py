"""Large buffers that were freed are used again, instead of coming new from the kernel each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# 16 buffers of 2 MiB that are filled and freed together, again and again; prints the page faults of the last ten rounds.
PROGRAM = """
import resource, sys
from shared.process.malloc import keep_large_buffers
if sys.argv[1] == "keep":
    keep_large_buffers()
pattern = b"x" * 4096
def round():
    buffers = [pattern * 512 for _ in range(16)]
for _ in range(5):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(mode: str) -> int:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], cwd=root, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_freed_buffers_are_kept() -> None:
    assert num_faults("keep") < num_faults("default") / 10
