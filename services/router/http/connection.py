"""Work that only makes sense while the client is there, the request's time is not up, and the server has not been stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.router.http.context import RequestContext
from services.router.http.errors import ClientGone
from services.router.http.metrics import CLIENT_DISCONNECTS
from services.router.http.stopping import ServerStopping
from shared.base.errors import DeadlineExceeded, TwostrokeError
from shared.process.tasks import cancel_and_wait

T = TypeVar("T")


async def while_wanted(context: RequestContext, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client goes away first, the time is up or the server stops, `work` is cancelled and has ended
    when ClientGone, DeadlineExceeded or ServerStopping is raised.

    `receive` is the request's, and its body must have been read.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    stopping = asyncio.create_task(context.stopping.over.wait())
    try:
        await asyncio.wait((working, watching, stopping), timeout=max(0.0, context.left_s), return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(working)
        if working.cancelled():
            raise _why_not(context, is_client_gone=watching.done())
        return working.result()  # also if it ended in the meantime
    finally:
        for task in (working, watching, stopping):
            await cancel_and_wait(task)


def _why_not(context: RequestContext, is_client_gone: bool) -> TwostrokeError:
    if is_client_gone:
        CLIENT_DISCONNECTS.inc()
        return ClientGone("the client went away")
    if context.stopping.over.is_set():
        return ServerStopping("the server stops and cannot finish this request")
    return DeadlineExceeded(f"the request took longer than {context.timeout_s:g} s")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
