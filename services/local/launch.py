"""Becomes another program, tied to its parent's life: `python launch.py PARENT_PID CPUS COMMAND…`.

Run as a script, so that between fork and exec of a supervisor with threads no Python has to run. On Linux the kernel kills the
program when its parent is gone, however the parent died, and CPUS ("0,1", or "" for all) are the cores it may use.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def launch_command(command: tuple[str, ...], cpus: tuple[int, ...] = ()) -> list[str]:
    """The command line that makes this process the guardian of `command`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), ",".join(map(str, cpus)), *command]


def main(parent_pid: str, cpus: str, *command: str) -> NoReturn:
    if sys.platform == "linux":
        _die_with_parent(int(parent_pid))
        if cpus:
            os.sched_setaffinity(0, map(int, cpus.split(",")))
    os.execvp(command[0], command)


def _die_with_parent(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the kernel knew
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
