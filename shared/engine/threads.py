"""Who computes with how many threads.

A thread that computes with several has a team of OpenMP threads, which waits for the next product of a step by spinning for some
microseconds before it sleeps. But if all teams together have more threads than there are cores, no team spins at all, and every
product then waits for threads to wake up. So only the engine's thread has a team. The event loop's, which copies blocks, uses one
core, and the thread that loaded the model is gone when the engine starts, its team with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

R = TypeVar("R")


def compute_on_one_core() -> None:
    """What the calling thread computes, it computes alone, whatever number of threads is set later on by others."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread takes over the process's number when it first asks: now, while it is 1


def in_own_thread(function: Callable[[], R]) -> R:
    """The result of `function`, or its exception. Unlike an executor's, the thread keeps no interrupted process alive."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return future.result()
    finally:
        if future.done():
            thread.join()
