"""Background tasks. None may end unnoticed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any

from shared.base.exit_codes import BROKEN

log = logging.getLogger(__name__)


def start_essential(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that the process cannot do without. If it ends by an error, so does the process: alive and useless is worse than gone,
    because whoever supervises it would not know."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_exit_if_failed)
    return task


def _exit_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("task %s failed; exiting", task.get_name(), exc_info=error)
        os._exit(BROKEN)


async def cancel_and_wait(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits until it has ended, whatever it ends with."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
