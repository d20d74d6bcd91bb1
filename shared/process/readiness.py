"""How a service tells its supervisor how far its start has come.

The supervisor hands a pipe down and names its descriptor in TWOSTROKE_READY_FD; the service writes lines into it: any number of
`progress TEXT`, then one `ready`. A service that nobody supervises has no such variable, and these calls do nothing.
"""

from __future__ import annotations

import os

READY_FD_VARIABLE = "TWOSTROKE_READY_FD"
PROGRESS = "progress "
READY = "ready"


def notify_progress(text: str) -> None:
    """Says in a few words what this process is doing before it is ready, such as "loading the model"."""
    _write(PROGRESS + " ".join(text.split()))


def notify_ready() -> None:
    """Says that this process does its work from now on."""
    _write(READY)


def _write(line: str) -> None:
    if not (fd := os.environ.get(READY_FD_VARIABLE)):
        return
    os.set_inheritable(int(fd), False)  # a process that this one starts must not speak for it
    try:
        os.write(int(fd), f"{line}\n".encode())
    except BrokenPipeError:
        del os.environ[READY_FD_VARIABLE]  # the supervisor is gone
