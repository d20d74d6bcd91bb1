"""The work: who asks for what, and when. Lengths and arrivals are the same in every run and for every engine; the text is not.

single    one stream alone: what one user feels of an idle server
mixed     64 requests of many lengths at once: throughput, and who waits for whom
poisson   the same lengths arriving at random: a server below its limit
prefix    requests one after another that share a long beginning: what a prefix cache saves
pause     a long prompt arrives among 8 running streams: how long they stand still
scaling   1, 8 and 32 streams, each sending its next request when the last has ended
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.load.client import Client, Completion
from bench.load.config import SCALING_STREAMS, WorkConfig
from bench.load.measures import (
    COLD_OVER_WARM,
    COLD_TTFT,
    GAP_OVER_ITL,
    ITL_BEFORE_P50,
    ITL_BEFORE_P99,
    LONG_TTFT,
    WARM_TTFT,
    WORST_GAP,
    Measure,
    Run,
    percentile,
)
from bench.load.text import PromptSource

_LENGTHS_SEED, _ARRIVALS_SEED = 12345, 777
_NUM_LENGTHS = 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, in tokens."""

    prompt: int
    output: int


SINGLE = Lengths(prompt=128, output=128)
WARM_UP = (Lengths(200, 24),) * 8 + (Lengths(700, 8),)


def mixed_lengths(num_requests: int) -> list[Lengths]:
    """Lognormal, as in chat traffic: prompts with median 256 within 16..1024, outputs with median 128 within 8..512."""
    rng = np.random.default_rng(_LENGTHS_SEED)
    prompts = np.clip(rng.lognormal(np.log(256), 0.8, _NUM_LENGTHS), 16, 1024).astype(int).tolist()
    outputs = np.clip(rng.lognormal(np.log(128), 0.7, _NUM_LENGTHS), 8, 512).astype(int).tolist()
    return [Lengths(prompts[i % _NUM_LENGTHS], outputs[i % _NUM_LENGTHS]) for i in range(num_requests)]


def poisson_arrivals_s(rate: float, duration_s: float) -> list[float]:
    """Times since the start at which requests arrive, `rate` a second on average."""
    rng = random.Random(_ARRIVALS_SEED)
    arrivals_s = []
    due_s = rng.expovariate(rate)
    while due_s < duration_s:
        arrivals_s.append(due_s)
        due_s += rng.expovariate(rate)
    return arrivals_s


@dataclass(frozen=True, slots=True)
class Workload:
    """`run` does the work once. `num_requests` is for the progress bar."""

    name: str
    num_requests: int
    run: Callable[[Client, PromptSource], Awaitable[Run]]


def make_workloads(config: WorkConfig) -> list[Workload]:
    """In the order asked for; `scaling` becomes one for each number of streams."""
    return [workload for name in config.workloads for workload in _make(name, config)]


def _make(name: str, config: WorkConfig) -> list[Workload]:
    mixed = mixed_lengths(config.num_requests)
    arrivals_s = poisson_arrivals_s(config.rate, config.duration_s)
    prefix = Prefix(config.prefix_tokens, config.question_tokens)
    pause = Pause(config.long_prompt_tokens)
    match name:
        case "single":
            return [Workload(name, 1, lambda client, prompts: at_once(client, prompts, [SINGLE], 1))]
        case "mixed":
            most = config.concurrency or len(mixed)
            return [Workload(name, len(mixed), lambda client, prompts: at_once(client, prompts, mixed, most))]
        case "poisson":
            return [Workload(name, len(arrivals_s), lambda client, prompts: arriving(client, prompts, arrivals_s))]
        case "prefix":
            return [Workload(name, prefix.num_requests, prefix.run)]
        case "pause":
            return [Workload(name, pause.num_streams + 1, pause.run)]
        case _:
            return [_scaling(num_streams) for num_streams in SCALING_STREAMS]


def _scaling(num_streams: int) -> Workload:
    lengths = mixed_lengths(max(8, 4 * num_streams))
    return Workload(f"scaling-{num_streams}", len(lengths), lambda client, prompts: at_once(client, prompts, lengths, num_streams))


async def warm_up(client: Client, prompts: PromptSource) -> str:
    """Makes the server compile and allocate what it does at its first requests. Returns an error, or nothing."""
    run = await at_once(client, prompts, WARM_UP, len(WARM_UP))
    return next((completion.error for completion in run.completions if not completion.is_good), "")


async def at_once(client: Client, prompts: PromptSource, lengths: Sequence[Lengths], concurrency: int) -> Run:
    """Requests with these lengths, the next whenever fewer than `concurrency` are running."""
    asked = [(prompts.cut(one.prompt), one.output) for one in lengths]
    remaining = iter(asked)

    async def stream() -> list[Completion]:
        return [await client.complete(prompt, max_tokens) for prompt, max_tokens in remaining]

    started_at = time.perf_counter()
    streams = await asyncio.gather(*(stream() for _ in range(concurrency)))
    return Run([one for completions in streams for one in completions], time.perf_counter() - started_at)


async def arriving(client: Client, prompts: PromptSource, arrivals_s: Sequence[float]) -> Run:
    """A request at each of these times since the start, whether or not earlier ones have ended."""
    asked = [(prompts.cut(one.prompt), one.output) for one in mixed_lengths(len(arrivals_s))]
    started_at = time.perf_counter()
    tasks = []
    for due_s, (prompt, max_tokens) in zip(arrivals_s, asked, strict=True):
        await asyncio.sleep(max(0.0, started_at + due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(client.complete(prompt, max_tokens)))
    completions = await asyncio.gather(*tasks)
    return Run(completions, time.perf_counter() - started_at)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Requests one after another: a beginning shared by all, and a question of each one's own."""

    prefix_tokens: int
    question_tokens: int
    num_requests: int = 16
    output_tokens: int = 16

    async def run(self, client: Client, prompts: PromptSource) -> Run:
        shared = prompts.cut(self.prefix_tokens)
        asked = [shared + prompts.cut(self.question_tokens) for _ in range(self.num_requests)]
        started_at = time.perf_counter()
        completions = [await client.complete(prompt, self.output_tokens) for prompt in asked]
        return Run(completions, time.perf_counter() - started_at, _prefix_values(completions))


def _prefix_values(completions: Sequence[Completion]) -> dict[Measure, float]:
    cold, *warm = completions
    warm_s = [completion.ttft_s for completion in warm if completion.is_good]
    if not cold.is_good or not warm_s:
        return {}
    warm_ttft_s = statistics.median(warm_s)
    return {COLD_TTFT: cold.ttft_s, WARM_TTFT: warm_ttft_s, COLD_OVER_WARM: cold.ttft_s / warm_ttft_s}


@dataclass(frozen=True, slots=True)
class Pause:
    """Streams start, run alone for a while, get company of a long prompt, run on for a moment, and are cancelled.

    The common measures are those of the streams, which are long enough not to end by themselves.
    """

    long_prompt_tokens: int
    num_streams: int = 8
    stream: Lengths = Lengths(prompt=128, output=1400)
    long_output_tokens: int = 16
    num_settling_chunks: int = 24  # of every stream, before the undisturbed time begins
    undisturbed_s: float = 2.0
    afterwards_s: float = 1.0

    async def run(self, client: Client, prompts: PromptSource) -> Run:
        started_at = time.perf_counter()
        streams = [Completion(self.stream.prompt, self.stream.output) for _ in range(self.num_streams)]
        long = Completion(self.long_prompt_tokens, self.long_output_tokens)
        settled = _Settled(self.num_streams, self.num_settling_chunks)
        tasks = [asyncio.create_task(client.run(one, prompts.cut(one.num_prompt_tokens), settled.note)) for one in streams]
        disturbing = asyncio.create_task(self._disturb(client, prompts, settled.event, long))
        await asyncio.wait((disturbing, *tasks), return_when=asyncio.FIRST_COMPLETED)
        if long.arrived_at:  # what is left lasts a moment, and a stream that ends in it does no harm
            await disturbing
        for task in (disturbing, *tasks):
            task.cancel()
        await asyncio.gather(disturbing, *tasks, return_exceptions=True)
        if disturbing.cancelled():
            _explain([*streams, long])
            return Run(streams, time.perf_counter() - started_at, companions=[long])
        values = _pause_values(streams, long, *disturbing.result())
        return Run(streams, time.perf_counter() - started_at, values, companions=[long])

    async def _disturb(
        self, client: Client, prompts: PromptSource, settled: asyncio.Event, long: Completion
    ) -> tuple[float, float]:
        """When the undisturbed time began and ended."""
        prompt = prompts.cut(long.num_prompt_tokens)
        await settled.wait()
        settled_at = time.perf_counter()
        await asyncio.sleep(self.undisturbed_s)
        arrived_at = time.perf_counter()
        await client.run(long, prompt)
        await asyncio.sleep(self.afterwards_s)
        return settled_at, arrived_at


class _Settled:
    """`event` is set when each of `num_streams` has had `num_chunks`."""

    def __init__(self, num_streams: int, num_chunks: int) -> None:
        self.event = asyncio.Event()
        self._num_left = num_streams
        self._num_chunks = num_chunks

    def note(self, completion: Completion) -> None:
        if len(completion.arrived_at) == self._num_chunks:
            self._num_left -= 1
            if self._num_left == 0:
                self.event.set()


def _explain(completions: Sequence[Completion]) -> None:
    """What ended first ended the run: by a failure, or because the server does not run that many streams side by side."""
    cause = next((one.error for one in completions if one.error), "a stream ended before the long prompt had its first token")
    for completion in completions:
        completion.error = completion.error or cause


def _pause_values(streams: Sequence[Completion], long: Completion, settled_at: float, arrived_at: float) -> dict[Measure, float]:
    if not all(completion.is_good for completion in (*streams, long)):
        return {}
    first_at = long.arrived_at[0]
    gaps = [pair for one in streams for pair in pairwise(one.arrived_at)]
    before_s = [end - start for start, end in gaps if start >= settled_at and end <= arrived_at]
    during_s = [end - start for start, end in gaps if end > arrived_at and start < first_at]
    if not before_s or not during_s:
        return {LONG_TTFT: long.ttft_s}
    before_p99_s, worst_s = percentile(before_s, 99), max(during_s)
    return {
        ITL_BEFORE_P50: percentile(before_s, 50),
        ITL_BEFORE_P99: before_p99_s,
        WORST_GAP: worst_s,
        GAP_OVER_ITL: worst_s / before_p99_s,
        LONG_TTFT: long.ttft_s,
    }
