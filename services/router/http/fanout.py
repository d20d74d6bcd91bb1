"""The generations of several prompts as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.router.dispatch.backend import Generation
from shared.base.request import Output
from shared.process.tasks import cancel_and_wait

# Outputs that may wait for a client that reads slowly; beyond that the generations wait.
MAX_WAITING_OUTPUTS = 64

_Queue = asyncio.Queue[tuple[int, Output] | Exception | None]  # None: all have ended


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Output], None]:
    """(which generation, its output), as they come; one that fails fails all. Closing the generations stays the caller's."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
    queue: _Queue = asyncio.Queue(MAX_WAITING_OUTPUTS)

    pumps = asyncio.create_task(_pump_all(generations, queue))
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        await cancel_and_wait(pumps)


async def _pump_all(generations: Sequence[Generation], queue: _Queue) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for i, generation in enumerate(generations):
                group.create_task(_pump(i, generation, queue))
    except* Exception as errors:
        await queue.put(_first(errors))
    else:
        await queue.put(None)


async def _pump(index: int, generation: Generation, queue: _Queue) -> None:
    async for output in generation:
        await queue.put((index, output))


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
