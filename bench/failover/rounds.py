"""One round of the failover measurement: streams run, a worker is killed, every stream ends, and every token is looked at.

    decode    streams start one by one, so that each one's worker is known ─> the busiest worker is killed ─> they go on elsewhere
    prefill   streams run; a prompt is computed undisturbed, and once more ─> the worker that computes it is killed ─> another does

No request finds anything of another in a cache: each has a salt of its own. The killed worker is back before the next round.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from bench.compare.stack import Stack
from bench.failover.token_stream import Difference, StreamEnded, TokenStream, compare
from bench.failover.workers import Workers
from shared.base.worker_info import Role, WorkerId

_SETTLING_TOKENS = 8  # of every stream, before a worker is killed
REQUEST_TIMEOUT_S = 120.0
_MORE_OUTPUT = "try more --output-tokens"


class RoundFailed(Exception):
    """It did not come to the kill that was to be measured."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What every stream of a round has got, compared with the undisturbed run."""

    num_tokens: int = 0
    difference: Difference = field(default_factory=Difference)
    errors: tuple[str, ...] = ()

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(self.num_tokens + other.num_tokens, self.difference + other.difference, self.errors + other.errors)

    @property
    def is_good(self) -> bool:
        return not self.difference and not self.errors


@dataclass(frozen=True, slots=True)
class DecodeKill:
    """Seconds."""

    victim: str
    itl_p50_s: float  # of all streams, before
    pauses_s: Sequence[float]  # of the streams that the victim served
    other_gaps_s: Sequence[float]  # the longest of each other stream since
    num_failovers: int  # as the router counts them
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PrefillKill:
    """Seconds. `is_hit` is False if the first token had come, or was about to, when the worker was killed, or never came."""

    victim: str
    is_hit: bool
    undisturbed_ttft_s: float
    ttft_s: float
    other_gaps_s: Sequence[float]  # the longest of each stream since
    verdict: Verdict


@dataclass(slots=True)
class Job:
    """What a stream is to do, and the tokens that it gets if nobody is killed."""

    prompt: Sequence[int]
    max_tokens: int
    expected: Sequence[str] = ()

    def stream(self) -> TokenStream:
        return TokenStream(self.prompt, self.max_tokens)


@dataclass(slots=True)
class Rounds:
    stack: Stack
    workers: Workers
    jobs: Sequence[Job]  # of the streams
    long_job: Job  # whose prompt is being computed when a prefill worker is killed
    salt: str  # no other run's
    _numbers: count[int] = field(default_factory=count)
    _num_kills: Counter[WorkerId] = field(default_factory=Counter)

    async def run_undisturbed(self) -> None:
        """Computes what every stream must get. Raises RoundFailed."""
        jobs = [*self.jobs, self.long_job]
        streams = [job.stream() for job in jobs]
        await asyncio.gather(*map(self._run, streams))
        for job, stream in zip(jobs, streams, strict=True):
            if stream.error:
                raise RoundFailed(f"before anything was killed: {stream.error}")
            job.expected = stream.tokens

    async def kill_decode(self) -> DecodeKill:
        """Raises RoundFailed or WorkerLost."""
        await self.workers.all_alive()
        num_failovers = await self._num_failovers("decode")
        streams = [job.stream() for job in self.jobs]
        async with _tasks() as tasks:
            homes = [await self._start(tasks, stream) for stream in streams]
            await _settled(streams)
            victim = max(sorted(set(homes)), key=lambda home: (homes.count(home), -self._num_kills[home]))  # of equals, in turn
            killed_at = self._kill(victim)
        return DecodeKill(
            victim,
            statistics.median(gap for stream in streams for gap in stream.gaps_s(killed_at)),
            [stream.longest_gap_s(killed_at) for stream, home in zip(streams, homes, strict=True) if home == victim],
            [stream.longest_gap_s(killed_at) for stream, home in zip(streams, homes, strict=True) if home != victim],
            await self._num_failovers("decode") - num_failovers,
            _judge(self.jobs, streams),
        )

    async def kill_prefill(self) -> PrefillKill:
        """Raises RoundFailed or WorkerLost."""
        await self.workers.all_alive()
        num_failovers = await self._num_failovers("prefill")
        streams = [job.stream() for job in self.jobs]
        undisturbed, long = self.long_job.stream(), self.long_job.stream()
        async with _tasks() as tasks:
            tasks += [asyncio.create_task(self._run(stream)) for stream in streams]
            await _settled(streams)
            await self._run(undisturbed)
            tasks.append(asyncio.create_task(self._run(long)))
            victim = await self._busy_prefill(long)
            await asyncio.sleep(undisturbed.ttft_s / 2)  # it has computed for a while: the worst time to lose it
            is_early = not long.tokens
            killed_at = self._kill(victim)
        return PrefillKill(
            victim,
            is_early and bool(long.tokens) and await self._num_failovers("prefill") > num_failovers,
            undisturbed.ttft_s,
            long.ttft_s,
            [stream.longest_gap_s(killed_at) for stream in streams],
            _judge([*self.jobs, self.long_job, self.long_job], [*streams, undisturbed, long]),
        )

    async def _run(self, stream: TokenStream) -> None:
        await stream.run(self.stack.endpoint, self.stack.model, f"{self.salt}-{next(self._numbers)}", REQUEST_TIMEOUT_S)

    async def _start(self, tasks: list[asyncio.Task[None]], stream: TokenStream) -> WorkerId:
        """Returns the decode worker that has one sequence more when this stream has started."""
        before = await self.workers.num_running(Role.DECODE)
        tasks.append(asyncio.create_task(self._run(stream)))
        await _until(stream, 2)  # the second token, unlike the first, takes a step of the decode worker
        after = await self.workers.num_running(Role.DECODE)
        homes = [worker_id for worker_id in after if after[worker_id] > before[worker_id]]
        if len(homes) != 1:
            raise RoundFailed(f"a stream that started left no trace: {before} before, {after} after; {_MORE_OUTPUT}")
        return homes[0]

    async def _busy_prefill(self, long: TokenStream) -> WorkerId:
        """The prefill worker that computes something. Asks without a rest, but only for as long as a prompt takes."""
        while not long.is_ended:
            for worker_id, num_running in (await self.workers.num_running(Role.PREFILL)).items():
                if num_running:
                    return worker_id
        raise RoundFailed("a prompt was computed before anybody was seen to do it; try a larger --long-prompt-tokens")

    def _kill(self, victim: WorkerId) -> float:
        self._num_kills[victim] += 1
        return self.workers.kill(victim)

    async def _num_failovers(self, leg: str) -> int:
        return int((await self.stack.metrics()).total("twostroke_failovers_total", leg=leg))


@asynccontextmanager
async def _tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    """What is put into the list has ended when this is left: by itself, or cancelled if the block failed."""
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _settled(streams: Sequence[TokenStream]) -> None:
    """Every stream runs steadily. Raises RoundFailed if one has ended."""
    for stream in streams:
        await _until(stream, len(stream.tokens) + _SETTLING_TOKENS)
    if any(stream.is_ended for stream in streams):
        raise RoundFailed(f"a stream ended before the kill; {_MORE_OUTPUT}")


async def _until(stream: TokenStream, num_tokens: int) -> None:
    try:
        await stream.until(num_tokens)
    except StreamEnded as ended:
        raise RoundFailed(f"{ended}; {_MORE_OUTPUT}") from None


def _judge(jobs: Sequence[Job], streams: Sequence[TokenStream]) -> Verdict:
    return sum((_judge_one(job, stream) for job, stream in zip(jobs, streams, strict=True)), Verdict())


def _judge_one(job: Job, stream: TokenStream) -> Verdict:
    return Verdict(len(stream.tokens), compare(job.expected, stream.tokens), (stream.error,) if stream.error else ())
