"""The engine loop: one thread that turns plans into tokens.

    submit / reserve / commit ──> scheduler state ──schedule()──> Plan ──launch, wait──> samples ──update()──> events ──> listener
                                  └──────── under the lock ───────┘       no lock        └─ under the lock ─┘

The lock covers bookkeeping only, never arithmetic, so a caller waits microseconds for it while a forward pass runs. An idle engine
sleeps on the condition. Callers may be any threads; the listener is called on the engine's thread, after every
step, also when the step only freed blocks.

A runner that is asynchronous gets the next step before the engine waits for the one that it is computing, where the next one can be
planned already (`shared/engine/schedule/lookahead.py`). Then the CPU prepares one step while the device computes another.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn, Protocol

from shared.base.errors import Internal, TwostrokeError, Unavailable
from shared.base.exit_codes import BROKEN
from shared.base.request import Output, Request
from shared.base.worker_info import Load
from shared.engine import metrics
from shared.engine.compute.layer_progress import layer_progress
from shared.engine.compute.sampler import NotFiniteLogits
from shared.engine.schedule.plan import Event, Failure, Pending, Plan, Progress, SampledToken
from shared.engine.schedule.scheduler import Scheduler
from shared.engine.schedule.sequence import Sequence as EngineSequence
from shared.engine.watchdog import Watchdog

log = logging.getLogger(__name__)

# A step that fails ends its own requests. This many in a row mean that the device or the process is broken: a restart is better.
_MAX_CONSECUTIVE_FAILURES = 3

Listener = Callable[[Sequence[Event]], None]
OnGrant = Callable[[EngineSequence], object]


class Runner(Protocol):
    """What executes plans, in order: `shared.engine.compute.runner.ModelRunner`, or a fake."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the step is computed, so that it pays to launch the next one meanwhile."""

    def launch(self, plan: Plan, on_layer: Callable[[int], None] | None = None) -> Pending:
        """Starts a step. Raises if that fails; what fails later is raised by what is returned. Where it is known before the end,
        `on_layer` is told on this thread how many layers' KV is there."""


@dataclass(slots=True)
class _Step:
    """A step that has been launched."""

    plan: Plan
    pending: Pending
    begun_at: float  # when the engine turned to it, or the step before it ended
    launched_at: float  # when it was launched, or the step before it ended
    num_preemptions: int = 0  # to make room for it


@dataclass(frozen=True, slots=True)
class _NotLaunched:
    error: Exception

    def is_done(self) -> bool:
        return True

    def wait(self) -> NoReturn:
        raise self.error


class Engine:
    def __init__(self, runner: Runner, scheduler: Scheduler, listener: Listener) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._listener = listener
        self._on_grant: dict[str, OnGrant] = {}  # by request, of those that ask for blocks
        self._wake = threading.Condition()
        self._stopping = False
        self._num_steps = 0
        self._num_failures = 0
        self._prefill_rate = _PrefillRate()
        self._watchdog = Watchdog(_exit_stuck)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._watchdog.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the steps that have been launched. Requests still in it get no further events."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._watchdog.stop()

    # Requests

    def submit(self, request: Request, hold: bool = False) -> EngineSequence:
        """Queues a request. With `hold` it stops after its first token and keeps its blocks until `release` or `abort`."""
        sequence = EngineSequence(request, hold=hold)
        with self._changing():
            if self._stopping:
                raise Unavailable("this worker is stopping")
            self._scheduler.add(sequence)
        return sequence

    def reserve(self, request: Request, on_grant: OnGrant) -> None:
        """Asks for blocks for the whole prompt, which a prefill worker will fill. `on_grant` is called with the sequence when it
        has them, at once or later, on any thread; not after `abort`."""
        with self._changing():
            self._scheduler.reserve(request)
            self._on_grant[request.request_id] = on_grant

    def commit(self, request_id: str, first_tokens: Sequence[SampledToken], num_cached_tokens: int) -> list[Output]:
        """A reservation's blocks are complete. Returns outputs that may be passed on: its own, if it finds a seat."""
        with self._changing():
            return self._scheduler.commit(request_id, first_tokens, num_cached_tokens)

    def release(self, request_id: str) -> None:
        """A held sequence's blocks have been shipped."""
        with self._changing():
            self._scheduler.release(request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request in whatever state it is. Idempotent; True if it was alive."""
        with self._changing():
            self._on_grant.pop(request_id, None)
            return self._scheduler.abort(request_id)

    def stop_choice(self, request_id: str, choice: int) -> bool:
        """Ends one output of a request. Idempotent; True if it was alive."""
        with self._changing():
            return self._scheduler.stop_choice(request_id, choice)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Under the lock; afterwards, those that waited for what has been given back get it, and the loop looks for work."""
        with self._wake:
            yield
            granted = [(sequence, self._on_grant.pop(sequence.id)) for sequence in self._scheduler.grant()]
            metrics.observe_state(self._scheduler)
            self._wake.notify()
        for sequence, on_grant in granted:
            on_grant(sequence)

    # What others want to know

    def load(self) -> Load:
        with self._wake:
            scheduler = self._scheduler
            return Load(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_waiting_tokens=scheduler.num_waiting_tokens,
                num_free_blocks=scheduler.blocks.num_free_blocks,
                num_steps=self._num_steps,
                prefill_tokens_per_s=self._prefill_rate.tokens_per_s,
            )

    def num_reserved_and_held(self) -> tuple[int, int]:
        with self._wake:
            return self._scheduler.num_reserved, self._scheduler.num_held

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes of blocks (stored, removed) since the last call: feeds the prefix index."""
        with self._wake:
            return self._scheduler.blocks.drain_events()

    def check(self) -> None:
        """Recounts every block. Raises AssertionError."""
        with self._wake:
            self._scheduler.check()

    # The loop

    def _run(self) -> None:
        try:
            step = self._begin()
            while step is not None:
                step = self._finish(step) or self._begin()
        except BaseException:
            # Bookkeeping is broken, so nothing this process says can be trusted. The router continues its requests elsewhere.
            log.critical("engine loop failed", exc_info=True)
            os._exit(BROKEN)

    def _begin(self) -> _Step | None:
        """Launches a step as soon as there is something to do. None: the engine is to stop."""
        plan, num_preemptions = Plan(), self._scheduler.num_preemptions
        while not plan.scheduled:  # else a preemption made room and nothing else happened: look again
            with self._wake:
                while not self._stopping and not self._scheduler.has_work:
                    self._wake.wait()
                if self._stopping:
                    return None
                begun_at = time.perf_counter()
                plan = self._scheduler.schedule()
            if plan.outputs:
                self._listener(plan.outputs)
        self._announce_first_chunks(plan)
        launched_at = time.perf_counter()
        self._watchdog.begin(plan.num_tokens)
        pending = self._launch(plan)
        return _Step(plan, pending, begun_at, launched_at, self._scheduler.num_preemptions - num_preemptions)

    def _launch(self, plan: Plan) -> Pending:
        try:
            return self._runner.launch(plan, layer_progress(plan, self._listener))
        except Exception as error:
            return _NotLaunched(error)

    def _look_ahead(self, step: _Step) -> _Step | None:
        """Launches the step after this one, if that can be told already."""
        if not self._runner.is_asynchronous or isinstance(step.pending, _NotLaunched):
            return None
        with self._wake:
            plan = None if self._stopping else self._scheduler.schedule_ahead()
        return None if plan is None else _Step(plan, self._launch(plan), step.begun_at, step.launched_at)

    def _finish(self, step: _Step) -> _Step | None:
        """Ends a step. Returns the one that has been launched after it, if any."""
        turned_at, is_done = time.perf_counter(), step.pending.is_done()
        ahead = self._look_ahead(step)
        idle_s = time.perf_counter() - turned_at if is_done else 0.0
        try:
            samples = step.pending.wait()
        except Exception as error:
            self._fail(step.plan, ahead, error)
            return None
        finally:
            ended_at = time.perf_counter()
            self._watchdog.end(step.plan.num_tokens, ended_at - step.launched_at)
        if ahead is not None:
            ahead.begun_at = ahead.launched_at = ended_at
            self._watchdog.begin(ahead.plan.num_tokens)
        with self._changing():
            events = self._scheduler.update(step.plan, samples)
            self._num_steps += 1
        self._num_failures = 0
        self._listener(events)
        # With a step under way, the device does not wait for what the engine has done since this one ended.
        whole_s = (time.perf_counter() if ahead is None else ended_at) - step.begun_at
        times = metrics.StepTimes(whole_s, ended_at - step.launched_at, idle_s)
        self._prefill_rate.observe(step.plan, times.execution_s)
        metrics.observe_step(step.plan, times, step.num_preemptions)
        return ahead

    def _announce_first_chunks(self, plan: Plan) -> None:
        """Tells who ships a prompt that it is being computed now, so that opening the transfer overlaps the first chunk."""
        first = [
            Progress(s.sequence.id, s.start) for s in plan.scheduled if s.sequence.hold and s.start == s.sequence.num_cached_tokens
        ]
        if first:
            self._listener(first)

    def _fail(self, plan: Plan, ahead: _Step | None, error: Exception) -> None:
        """Ends the requests at fault, or all of the step if it is not known which; the others' tokens are computed again. A step
        that was launched after this one counts for nothing either."""
        if ahead is not None:
            with suppress(Exception):  # it is enough that it has ended: until then it writes to its blocks
                ahead.pending.wait()
        failure: TwostrokeError
        if isinstance(error, NotFiniteLogits):
            ids, failure = error.request_ids, error
            log.error("%s", error)
        else:
            ids = list(dict.fromkeys(s.sequence.id for s in plan.scheduled))
            failure = Internal(f"an engine step failed: {type(error).__name__}")
            log.error("step of %d sequences failed", len(plan.scheduled), exc_info=error)
            self._count_failure()
        metrics.step_failures.inc()
        with self._changing():
            alive = [request_id for request_id in ids if self._scheduler.abort(request_id)]
            self._scheduler.discard(plan)
        self._listener([Failure(request_id, failure) for request_id in alive])

    def _count_failure(self) -> None:
        self._num_failures += 1
        if self._num_failures >= _MAX_CONSECUTIVE_FAILURES:
            log.critical("%d steps failed in a row; exiting", self._num_failures)
            os._exit(BROKEN)


def _exit_stuck(elapsed_s: float) -> None:
    log.critical("a step has not ended after %.1f s; exiting, so that others continue its requests", elapsed_s)
    os._exit(BROKEN)


class _PrefillRate:
    """How fast this worker computes prompts, learned from steps that are mostly prompt."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def observe(self, plan: Plan, seconds: float) -> None:
        prompt = sum(s.num_tokens for s in plan.scheduled if s.num_tokens > 1)
        if prompt < 64 or prompt < 0.8 * plan.num_tokens:
            return
        rate = prompt / seconds
        self.tokens_per_s = rate if self.tokens_per_s == 0.0 else 0.8 * self.tokens_per_s + 0.2 * rate
