"""Who computes with how many threads (shared/engine/threads.py)."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from shared.engine.threads import in_own_thread

SCRIPT = """
import os
import time
import torch
from concurrent.futures import ThreadPoolExecutor
from shared.engine.threads import compute_on_one_core, in_own_thread

def num_threads_of_process():
    return len(os.listdir("/proc/self/task"))

def product():
    torch.randn(512, 512) @ torch.randn(512, 512)
    (torch.randn(4, 1 << 20) + 1).sum()
    return torch.get_num_threads()

def settled():  # threads of a team end a moment after the one that they belong to
    deadline = time.monotonic() + 10
    while num_threads_of_process() > before and time.monotonic() < deadline:
        os.sched_yield()
    return num_threads_of_process() - before

compute_on_one_core()
product()
before = num_threads_of_process()

def load():
    torch.set_num_threads(3)
    return product()

print("loader", in_own_thread(load))
print("left", settled())
with ThreadPoolExecutor(1) as engine:
    print("engine", engine.submit(product).result())
print("loop", product())
"""


def test_only_the_thread_that_runs_steps_has_a_team() -> None:
    output = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60).stdout
    lines = dict(line.split(" ", 1) for line in output.splitlines())
    assert lines == {"loader": "3", "left": "0", "engine": "3", "loop": "1"}


def test_what_fails_in_the_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 / 0)


def test_the_thread_has_ended_when_its_result_is_there() -> None:
    thread = in_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
