"""Keeps a set of child processes running.

    start ─> each child ready once ─> watch: a child that ends is started again, at growing intervals ─> stop, stage by stage

A child that cannot be started at all is not tried for ever. Exit code 2 is a mistake in the configuration and ends the start with
the child's own words; a kill from outside ends it too, for at that time it is the kernel short of memory; anything else gets a
few tries.
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
        deadline_s = _now_s() + self._policy.stop_s
        for stage in sorted({kept.spec.stop_stage for kept in self._tasks.values()}):
            of_stage = [task for task, kept in self._tasks.items() if kept.spec.stop_stage == stage]
            for task in of_stage:
                if (child := self._tasks[task].child) is not None:
                    child.terminate()
            await asyncio.wait(of_stage, timeout=min(self._policy.stop_stage_s, max(0.0, deadline_s - _now_s())))
        if running := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(running, timeout=max(0.0, deadline_s - _now_s()))
        for task, kept in self._tasks.items():
            if not task.done() and kept.child is not None:
                kept.child.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, kept: _Kept) -> None:
        """Runs a child, and runs it again whenever it ends, until `stop`."""
        delay_s = self._policy.first_delay_s
        num_failed_starts = 0
        while True:
            child = kept.child = await Child.spawn(kept.spec, self._observer, kept.has_been_ready.set)
            if self._stopping.is_set():  # since `stop` looked at kept.child
                child.kill()
            exit_code = await child.wait()
            if self._stopping.is_set():
                return
            if not kept.has_been_ready.is_set():
                num_failed_starts += 1
                self._check_start(child, exit_code, num_failed_starts)
            if child.uptime_s > self._policy.stable_after_s:
                delay_s = self._policy.first_delay_s
            self._observer.ended(kept.spec.name, _end_of(child, exit_code), delay_s)
            if await self._stops_within(delay_s):
                return
            delay_s = min(2 * delay_s, self._policy.longest_delay_s)

    def _check_start(self, child: Child, exit_code: int, num_failed_starts: int) -> None:
        """Raises if a child that ended before it was ready should not be tried again."""
        name = child.spec.name
        if exit_code == CONFIG_ERROR:
            raise ConfigError(f"{name}: {child.last_line.removeprefix('error: ')}")
        if exit_code == -signal.SIGKILL:
            raise ConfigError(f"{name} was killed while it started, which the system does when there is too little memory")
        if num_failed_starts >= self._policy.max_failed_starts:
            raise ChildFailed(
                f"{name} ended {num_failed_starts} times before it was ready ({_end_of(child, exit_code)}); "
                f"its log is {child.spec.log_path}"
            )

    async def _stops_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


def _end_of(child: Child, exit_code: int) -> str:
    """How it ended, and what it said last if it had the chance to say why."""
    return f"{describe_exit(exit_code)}: {child.last_line}" if exit_code > 0 else describe_exit(exit_code)


def describe_exit(exit_code: int) -> str:
    """`exit code 1`, or `killed by SIGKILL`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
