"""One request's outputs as its reader sees them: in order, each token once, and an end within the
deadline whatever happens.

    reader <─ queue of a few outputs <─ Failover (places, attempts, continues) <─ workers

A reader that is slow fills the queue, which stops the reading from the workers. The deadline ends
the work also when nobody reads: what the workers hold is given back, and the reader finds the error
when it comes.
"""

from __future__ import annotations

import asyncio
import logging

from services.router.dispatch.backend import Generation
from services.router.dispatch.budget import Budget
from services.router.dispatch.choices import Choice
from services.router.dispatch.failover import Failover
from services.router.dispatch.fleet import Fleet
from services.router.dispatch.outputs import OutputQueue
from shared.base.errors import DeadlineExceeded, Internal, TwostrokeError, Unavailable
from shared.base.request import Output, Request
from shared.process.tasks import cancel_and_wait

log = logging.getLogger(__name__)

_MAX_WAITING_OUTPUTS = 64


class FleetGeneration(Generation):
    def __init__(self, fleet: Fleet, request: Request, deadline_s: float, worker_wait_s: float) -> None:
        self._request_id = request.request_id
        self._budget = Budget(deadline_s)
        self._choices = [Choice(request, index) for index in range(request.sampling.n)]
        self._outputs = OutputQueue(_MAX_WAITING_OUTPUTS)
        self._failover = Failover(fleet, request, self._choices, self._budget, worker_wait_s, self._outputs.put)
        self._is_closed = False
        self._work: asyncio.Task[None] | None = None

    def __aiter__(self) -> FleetGeneration:
        return self

    async def __anext__(self) -> Output:
        if self._work is None and not self._is_closed:
            self._work = asyncio.create_task(self._run())
        while (output := await self._outputs.get()) is not None:
            if not self._choices[output.choice].is_stopped:
                return output
        raise StopAsyncIteration

    def stop_choice(self, choice: int) -> None:
        self._failover.stop(self._choices[choice])
        if self._work is not None and all(each.has_ended for each in self._choices):
            self._work.cancel()

    async def aclose(self) -> None:
        self._is_closed = True
        self._outputs.discard()
        self._outputs.end(None)
        await cancel_and_wait(self._work)

    async def _run(self) -> None:
        error: TwostrokeError | None = None
        try:
            async with asyncio.timeout(self._budget.left_s) as timeout:
                await self._failover.run()
        except TwostrokeError as failure:
            error = failure
        except Exception as failure:
            error = self._unforeseen(failure, timeout)
        except asyncio.CancelledError:
            if not all(choice.has_ended for choice in self._choices):
                error = Unavailable("the server stopped this request")
            raise
        finally:
            self._outputs.end(error)

    def _unforeseen(self, failure: Exception, timeout: asyncio.Timeout) -> TwostrokeError:
        if isinstance(failure, TimeoutError) and timeout.expired():
            return DeadlineExceeded(f"the request took longer than {self._budget.seconds:.0f} s")
        log.error("request %s failed", self._request_id, exc_info=failure)
        return Internal("the router failed on this request")
