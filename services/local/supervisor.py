"""Keeps a set of child processes running.

    start ─> each child ready once ─> watch: a child that ends is started again, at growing intervals ─> stop, stage by stage

A child that was never ready is not tried for ever. Exit code 2 is a mistake in the configuration and ends the start with the
child's own words; a kill from outside ends it too, for at that time it is the kernel short of memory; anything else gets a few
tries. A child that was ready once is started again for as long as it takes, also where the system has no process left for it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from services.local.child import Child, ChildSpec, Observer
from shared.base.errors import ConfigError
from shared.base.exit_codes import CONFIG_ERROR


class ChildFailed(Exception):
    """A child ended again and again before it was ever ready."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When to start an ended child again, and how long a stop may take."""

    first_delay_s: float = 0.2  # doubled at each further end
    longest_delay_s: float = 10.0
    stable_after_s: float = 30.0  # a child that ran this long starts with the first delay again
    max_failed_starts: int = 3
    stop_stage_s: float = 0.5  # then the next stage is stopped too
    stop_s: float = 2.5  # then whatever still runs is killed: all is over within 5 s, also on a busy machine


@dataclass(frozen=True, slots=True)
class _End:
    """Of a child, or of the attempt to start it."""

    exit_code: int | None  # negative for a signal; None: there was no process
    last_line: str
    uptime_s: float

    @property
    def reason(self) -> str:
        """How it ended, and what it said last if it had the chance to say why."""
        if self.exit_code is None:
            return self.last_line
        how = describe_exit(self.exit_code)
        return f"{how}: {self.last_line}" if self.exit_code > 0 else how


class _Kept:
    """A child that is to be running."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.has_been_ready = asyncio.Event()


class Supervisor:
    def __init__(self, observer: Observer, policy: Policy | None = None) -> None:
        self._observer = observer
        self._policy = policy or Policy()
        self._stopping = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], _Kept] = {}

    async def start(self, specs: Sequence[ChildSpec]) -> None:
        """Starts children side by side; returns when each has been ready. Raises ConfigError or ChildFailed, whichever child's
        failure came first, and then leaves the others running: `stop` ends them."""
        kept = [_Kept(spec) for spec in specs]
        for one in kept:
            self._tasks[asyncio.create_task(self._keep(one), name=one.spec.name)] = one
        ready = asyncio.ensure_future(asyncio.gather(*(one.has_been_ready.wait() for one in kept)))
        watch = asyncio.create_task(self.watch())
        try:
            await asyncio.wait((ready, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
        finally:
            ready.cancel()
            watch.cancel()
            await asyncio.gather(ready, watch, return_exceptions=True)

    async def watch(self) -> None:
        """Returns when `stop` is called; raises what ended the keeping of a child."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Asks children to end, lower stages first, and kills those that have not when the time is up."""
        self._stopping.set()
        deadline = _now() + self._policy.stop_s
        for stage in sorted({kept.spec.stop_stage for kept in self._tasks.values()}):
            of_stage = [task for task, kept in self._tasks.items() if kept.spec.stop_stage == stage]
            for task in of_stage:
                if (child := self._tasks[task].child) is not None:
                    child.terminate()
            await asyncio.wait(of_stage, timeout=min(self._policy.stop_stage_s, max(0.0, deadline - _now())))
        if running := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(running, timeout=max(0.0, deadline - _now()))
        for task, kept in self._tasks.items():
            if not task.done() and kept.child is not None:
                kept.child.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, kept: _Kept) -> None:
        """Runs a child, and runs it again whenever it ends, until `stop`."""
        delay_s = self._policy.first_delay_s
        num_failed_starts = 0
        while True:
            end = await self._run(kept)
            if self._stopping.is_set():
                return
            if not kept.has_been_ready.is_set():
                num_failed_starts += 1
                self._check_start(kept.spec, end, num_failed_starts)
            if end.uptime_s > self._policy.stable_after_s:
                delay_s = self._policy.first_delay_s
            self._observer.ended(kept.spec.name, end.reason, delay_s)
            if await self._stops_within(delay_s):
                return
            delay_s = min(2 * delay_s, self._policy.longest_delay_s)

    async def _run(self, kept: _Kept) -> _End:
        """A child from its start to its end."""
        try:
            child = kept.child = await Child.spawn(kept.spec, self._observer, kept.has_been_ready.set)
        except OSError as error:
            return _End(None, f"cannot be started: {error.strerror}", 0.0)
        if self._stopping.is_set():  # since `stop` looked at kept.child
            child.kill()
        exit_code = await child.wait()
        kept.child = None
        return _End(exit_code, child.last_line, child.uptime_s)

    def _check_start(self, spec: ChildSpec, end: _End, num_failed_starts: int) -> None:
        """Raises if a child that ended before it was ready should not be tried again."""
        if end.exit_code == CONFIG_ERROR:
            raise ConfigError(f"{spec.name}: {end.last_line.removeprefix('error: ')}")
        if end.exit_code == -signal.SIGKILL:
            raise ConfigError(f"{spec.name} was killed while it started, which the system does when there is too little memory")
        if num_failed_starts >= self._policy.max_failed_starts:
            log = f"; its log is {spec.log_path}" if spec.log_path else ""
            raise ChildFailed(f"{spec.name} ended {num_failed_starts} times before it was ready ({end.reason}){log}")

    async def _stops_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


def describe_exit(exit_code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _now() -> float:
    return asyncio.get_running_loop().time()
