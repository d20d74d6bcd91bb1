"""Supervised processes, with tiny Python children: starts, restarts, giving up, and ends of every kind."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.local.child import ChildSpec
from services.local.log_file import LogFile
from services.local.placement import place, usable_gpus
from services.local.supervisor import ChildFailed, Policy, Supervisor, describe_exit
from shared.base.errors import ConfigError

QUICK = Policy(first_delay_s=0.01, longest_delay_s=0.02, stop_stage_s=0.5, stop_s=1.0)
READY = "from shared.process.readiness import *; import os, sys, time, signal, subprocess; "
SERVE = READY + "notify_ready(); signal.pause()"
FULL = Path("/dev/full")  # as a file on a full disk


class Recorder:
    """An observer that remembers, and can be waited on."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []  # kind, child, text
        self.delays_s: list[float] = []  # before restarts
        self._changed = asyncio.Event()

    def progress(self, name: str, text: str) -> None:
        self._add("progress", name, text)

    def ready(self, name: str, elapsed_s: float) -> None:
        self._add("ready", name, "")

    def printed(self, name: str, line: str) -> None:
        self._add("printed", name, line)

    def trouble(self, name: str, text: str) -> None:
        self._add("trouble", name, text)

    def ended(self, name: str, reason: str, restart_in_s: float) -> None:
        self.delays_s.append(restart_in_s)
        self._add("ended", name, reason)

    def of(self, kind: str, name: str) -> list[str]:
        return [text for k, n, text in self.events if (k, n) == (kind, name)]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _add(self, *event: str) -> None:
        self.events.append(event)  # type: ignore[arg-type]
        self._changed.set()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def child(tmp_path: Path) -> Callable[..., ChildSpec]:
    def make(name: str, script: str, **options: object) -> ChildSpec:
        environ = {**os.environ, "PYTHONPATH": os.getcwd()}
        return ChildSpec(name, (sys.executable, "-c", script), environ, tmp_path / f"{name}.log", **options)  # type: ignore[arg-type]

    return make


async def test_start_returns_when_every_child_is_ready_and_reports_progress_before(recorder, child, tmp_path):
    supervisor = Supervisor(recorder, QUICK)
    await supervisor.start(
        [
            child("a", READY + "notify_progress('loading\\n it'); print('hello', flush=True); notify_ready(); signal.pause()"),
            child("b", SERVE),
        ]
    )
    assert {name for kind, name, _ in recorder.events if kind == "ready"} == {"a", "b"}
    assert recorder.of("progress", "a") == ["loading it"]
    await supervisor.stop()
    assert (tmp_path / "a.log").read_text() == "hello\n"


async def test_a_child_without_a_readiness_pipe_is_ready_when_it_prints_its_text(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    await supervisor.start([child("a", "print('now I accept', flush=True); import signal; signal.pause()", ready_text="I accept")])
    assert recorder.of("printed", "a") == ["now I accept"]
    await supervisor.stop()


async def test_a_child_that_dies_is_started_again(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    await supervisor.start([child("a", READY + "print(os.getpid(), flush=True); notify_ready(); signal.pause()")])
    watch = asyncio.create_task(supervisor.watch())
    os.kill(int(recorder.of("printed", "a")[0]), signal.SIGKILL)
    await recorder.until(lambda: len(recorder.of("ready", "a")) == 2)
    assert recorder.of("ended", "a")[0].startswith("killed by SIGKILL")
    first, second = recorder.of("printed", "a")
    assert first != second
    await supervisor.stop()
    await watch


async def test_a_child_that_never_gets_ready_is_given_up_with_its_last_words(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    with pytest.raises(ChildFailed, match=r"bad ended 3 times before it was ready \(exit code 1: ValueError: broken\).*bad\.log"):
        await supervisor.start([child("good", SERVE), child("bad", "raise ValueError('broken')")])
    await supervisor.stop()
    assert len(recorder.of("ended", "bad")) == 2


async def test_exit_code_2_ends_the_start_at_once_with_the_childs_own_line(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    script = "import sys; print('error: no such model', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ConfigError, match=r"^a: no such model$"):
        await supervisor.start([child("a", script)])
    await supervisor.stop()
    assert recorder.of("ended", "a") == []


async def test_a_kill_before_readiness_is_reported_as_too_little_memory(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    with pytest.raises(ConfigError, match="too little memory"):
        await supervisor.start([child("a", "import os; os.kill(os.getpid(), 9)")])
    await supervisor.stop()


async def test_a_kill_of_a_child_that_was_ready_is_no_reason_to_give_up(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    await supervisor.start([child("a", READY + "notify_ready(); os.kill(os.getpid(), 9)")])
    watch = asyncio.create_task(supervisor.watch())
    await recorder.until(lambda: len(recorder.of("ended", "a")) > 2 * QUICK.max_failed_starts)
    assert not watch.done()
    await supervisor.stop()
    await watch


async def delays_of(recorder, child, policy: Policy, count: int) -> list[float]:
    """Before the first restarts of a child that ends whenever it is ready."""
    supervisor = Supervisor(recorder, policy)
    await supervisor.start([child("a", READY + "notify_ready(); sys.exit(5)")])
    await recorder.until(lambda: len(recorder.delays_s) >= count)
    await supervisor.stop()
    return recorder.delays_s[:count]


async def test_delays_double_up_to_the_longest_while_a_child_keeps_ending_soon(recorder, child):
    policy = Policy(first_delay_s=0.01, longest_delay_s=0.05, stable_after_s=60.0)
    assert await delays_of(recorder, child, policy, 5) == [0.01, 0.02, 0.04, 0.05, 0.05]


async def test_a_child_that_ran_long_enough_starts_with_the_first_delay_again(recorder, child):
    policy = Policy(first_delay_s=0.01, longest_delay_s=0.05, stable_after_s=0.0)
    assert await delays_of(recorder, child, policy, 3) == [0.01, 0.01, 0.01]


class NoMoreProcesses:
    """Stands before the system's fork: fails `num_failures` times when armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_failures = 0
        self._spawn = asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self)

    async def __call__(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        if self.num_failures:
            self.num_failures -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await self._spawn(*command, **options)


async def test_a_restart_for_which_there_is_no_process_is_tried_until_there_is_one(recorder, child, monkeypatch):
    processes = NoMoreProcesses(monkeypatch)
    supervisor = Supervisor(recorder, QUICK)
    await supervisor.start([child("a", READY + "print(os.getpid(), flush=True); notify_ready(); signal.pause()")])
    watch = asyncio.create_task(supervisor.watch())
    num_failures = processes.num_failures = 3 * QUICK.max_failed_starts
    num_open = len(os.listdir("/proc/self/fd"))
    os.kill(int(recorder.of("printed", "a")[0]), signal.SIGKILL)
    await recorder.until(lambda: len(recorder.of("ready", "a")) == 2)
    assert recorder.of("ended", "a")[1:] == ["cannot be started: Resource temporarily unavailable"] * num_failures
    assert len(os.listdir("/proc/self/fd")) == num_open
    await supervisor.stop()
    await watch


async def test_a_first_start_for_which_there_is_no_process_is_given_up_with_the_reason(recorder, child, monkeypatch):
    NoMoreProcesses(monkeypatch).num_failures = QUICK.max_failed_starts
    supervisor = Supervisor(recorder, QUICK)
    with pytest.raises(ChildFailed, match=r"a ended 3 times .*cannot be started: Resource temporarily unavailable"):
        await supervisor.start([child("a", SERVE)])
    await supervisor.stop()


async def test_a_child_whose_log_cannot_be_written_runs_on_and_that_is_said_once(recorder, child):
    spec = replace(child("a", READY + "print('x' * 99 + '\\n' * 9999); print('y' * 300_000, flush=True); " + SERVE), log_path=FULL)
    supervisor = Supervisor(recorder, QUICK)
    await supervisor.start([spec])
    assert recorder.of("trouble", "a") == ["cannot write /dev/full, so its output is lost: No space left on device"]
    assert sum(line.count("y") for line in recorder.of("printed", "a")) == 300_000
    await supervisor.stop()


@pytest.mark.parametrize("path", [None, Path("/no/such/folder/log")])
async def test_a_child_without_a_log_serves_and_keeps_its_last_words(recorder, child, path):
    supervisor = Supervisor(recorder, QUICK)
    good = replace(
        child("good", "print('now I accept', flush=True); import signal; signal.pause()", ready_text="accept"), log_path=path
    )
    await supervisor.start([good])
    bad = replace(child("bad", "raise ValueError('broken')"), log_path=path)
    with pytest.raises(ChildFailed, match="ValueError: broken"):
        await supervisor.start([bad])
    await supervisor.stop()


def test_a_log_is_written_again_when_there_is_room_and_each_outage_is_said_once(tmp_path):
    told: list[str] = []
    folder = tmp_path / "logs"
    log = LogFile(folder / "a.log", told.append)
    log.write("lost")
    log.write("lost too")
    assert len(told) == 1
    folder.mkdir()
    log.write("kept")
    log.close()
    (folder / "a.log").unlink()
    folder.rmdir()
    log.write("lost again")
    assert len(told) == 2
    folder.mkdir()
    log.write("kept \ud800 again")
    log.close()
    assert (folder / "a.log").read_text() == "kept ? again\n"
    assert (folder / "a.log").stat().st_mode & 0o777 == 0o600


async def test_stop_asks_stage_by_stage_and_kills_who_does_not_listen_within_the_deadline(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    polite = READY + "signal.signal(15, lambda *_: sys.exit(print('bye', flush=True))); notify_ready(); signal.pause()"
    deaf = READY + "signal.signal(15, signal.SIG_IGN); notify_ready(); [signal.pause() for _ in iter(int, 1)]"
    await supervisor.start([child("late", polite, stop_stage=2), child("deaf", deaf, stop_stage=1), child("early", polite)])
    started_s = time.monotonic()
    await supervisor.stop()
    elapsed_s = time.monotonic() - started_s
    assert QUICK.stop_stage_s <= elapsed_s < QUICK.stop_s + 0.5
    assert [name for kind, name, text in recorder.events if text == "bye"] == ["early", "late"]


async def test_stop_during_the_wait_before_a_restart_does_not_start_it_again(recorder, child):
    supervisor = Supervisor(recorder, Policy(first_delay_s=60.0))
    await supervisor.start([child("a", READY + "notify_ready(); sys.exit(5)")])
    await recorder.until(lambda: bool(recorder.of("ended", "a")))
    await asyncio.wait_for(supervisor.stop(), 1.0)
    assert len(recorder.of("ready", "a")) == 1


async def test_what_a_child_leaves_behind_ends_with_it(recorder, child):
    supervisor = Supervisor(recorder, Policy(first_delay_s=60.0))
    leave = READY + "p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); notify_ready(); sys.exit(3)"
    await supervisor.start([child("a", leave)])
    await recorder.until(lambda: bool(recorder.of("ended", "a")))
    await supervisor.stop()
    _assert_ends(int(recorder.of("printed", "a")[0]))


def test_killing_the_supervisor_kills_its_children(tmp_path):
    script = (
        "import asyncio, sys, signal; from pathlib import Path; from tests.unit.test_supervisor import *;\n"
        "class Show(Recorder):\n  def printed(self, name, line): print(line, flush=True)\n"
        "async def main():\n"
        f"  path = Path({str(tmp_path)!r}) / 'log'\n"
        "  command = (sys.executable, '-c', 'import os, signal; print(os.getpid(), flush=True); signal.pause()')\n"
        "  await Supervisor(Show()).start([ChildSpec('a', command, dict(os.environ), path)])\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        supervisor.kill()
        _assert_ends(pid)


async def test_a_child_stays_on_its_cores(recorder, child):
    supervisor = Supervisor(recorder, QUICK)
    core = max(os.sched_getaffinity(0))
    script = READY + "print(os.sched_getaffinity(0), flush=True); notify_ready(); signal.pause()"
    await supervisor.start([child("a", script, cpus=(core,))])
    await recorder.until(lambda: bool(recorder.of("printed", "a")))
    assert recorder.of("printed", "a") == [f"{{{core}}}"]
    await supervisor.stop()


@pytest.mark.parametrize(
    ("code", "words"), [(1, "exit code 1"), (-9, "killed by SIGKILL"), (-34, "killed by SIGRTMIN"), (-40, "killed by signal 40")]
)
def test_an_exit_is_described_in_words(code, words):
    assert describe_exit(code) == words


@pytest.mark.parametrize(
    ("num_workers", "cpus", "num_usable", "shares"),
    [
        (2, (0, 1), 2, [((0,), 1), ((1,), 1)]),
        (2, (0, 1, 2, 3, 4), 5, [((0, 1, 2), 3), ((3, 4), 2)]),
        (3, (4, 6), 2, [((4,), 1), ((6,), 1), ((4,), 1)]),
        (1, (0, 1), 2, [((0, 1), 2)]),
        (2, (), 2, [((), None), ((), None)]),
        (2, (0, 1, 2, 3, 4, 5), 3, [((0, 1, 2), 2), ((3, 4, 5), 1)]),  # a container with a quota
        (2, (0, 1, 2, 3), 1, [((0, 1), 1), ((2, 3), 1)]),
    ],
)
def test_workers_share_out_the_cores_and_what_a_quota_allows_of_them(num_workers, cpus, num_usable, shares):
    assert [(at.cpus, at.num_threads) for at in place(num_workers, cpus, num_usable, ())] == shares


def test_workers_take_turns_on_gpus_and_know_how_many_share_one():
    places = place(3, (0, 1), 2, ("0", "1"))
    assert [(at.gpu, at.num_on_gpu) for at in places] == [("0", 2), ("1", 1), ("0", 2)]
    assert {(at.cpus, at.num_threads) for at in places} == {((), None)}


def test_gpus_are_those_the_environment_shows_and_none_for_device_cpu():
    assert usable_gpus("auto", {"CUDA_VISIBLE_DEVICES": "3,5"}) == ("3", "5")
    assert usable_gpus("auto", {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert usable_gpus("cpu", {"CUDA_VISIBLE_DEVICES": "3"}) == ()


def _assert_ends(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([handle], [], [], 5.0)
    os.close(handle)
    assert ended
