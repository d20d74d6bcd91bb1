"""Work that only makes sense while the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.router.http.errors import ClientGone
from services.router.http.metrics import CLIENT_DISCONNECTS
from shared.process.tasks import cancel_and_wait

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client goes away first, `work` is cancelled, has ended, and ClientGone is raised.

    `receive` is the request's, and its body must have been read.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        CLIENT_DISCONNECTS.inc()
        raise ClientGone("the client went away")
    finally:
        await cancel_and_wait(watching)
        await cancel_and_wait(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
