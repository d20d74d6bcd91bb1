"""What ends a request's work: itself, its deadline, the server's stop, its client."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from services.router.http.connection import while_wanted
from services.router.http.context import RequestContext
from services.router.http.errors import ClientGone
from services.router.http.stopping import ServerStopping, Stopping
from shared.base.errors import DeadlineExceeded


class NoConnection:
    is_stuck = False

    def abort(self) -> None:
        raise AssertionError("not asked for")


def context(timeout_s: float = 60.0, stopping: Stopping | None = None) -> RequestContext:
    return RequestContext("r", False, time.perf_counter(), timeout_s, stopping or Stopping(), NoConnection())


async def stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("never")


async def leaves() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def forever() -> None:
    await asyncio.Event().wait()


async def ends_when_cancelled() -> str:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "complete"
    return "never"


async def test_the_deadline_the_stop_and_the_client_each_end_the_work_by_their_own_error() -> None:
    stopping = Stopping()
    stopping.end()
    with pytest.raises(DeadlineExceeded, match="longer than 0 s"):
        await while_wanted(context(timeout_s=0.0), stays, forever())
    with pytest.raises(ServerStopping):
        await while_wanted(context(stopping=stopping), stays, forever())
    with pytest.raises(ClientGone):
        await while_wanted(context(), leaves, forever())


async def test_work_that_completes_while_it_is_being_ended_counts_as_complete() -> None:
    """Its last event may have been written: nothing may follow."""
    assert await while_wanted(context(timeout_s=0.01), stays, ends_when_cancelled()) == "complete"


async def test_draining_waits_for_those_that_run_and_then_ends_the_rest() -> None:
    stopping = Stopping()
    with stopping.running():
        draining = asyncio.create_task(stopping.drain(60.0))
        with stopping.running():
            await asyncio.sleep(0)
            assert stopping.is_draining
            assert not stopping.over.is_set()
        await asyncio.sleep(0)
        assert not draining.done()
    await draining
    assert stopping.over.is_set()
    impatient = Stopping()
    with impatient.running():
        await impatient.drain(0.0)
        assert impatient.over.is_set()
