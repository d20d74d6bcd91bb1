"""What the handoff costs a client: its share of the time to the first token, by prompt length and transport.

    python -m bench.handoff [--lengths 512,2048,8192] [--transports shm,grpc,gloo] [--repeats 3] [--json FILE]

One prefill and one decode worker serve one request at a time, and every prompt is handed over. Each request's stages are known
exactly: the router's histograms are read before and after it, and nobody else asks for anything.

    client sends ─> router, Generate, Prefill ─> queue ─> compute ─> last blocks, commit, acknowledgement
                                                                 └─> first token at decode ─> router ─> client
    overhead = TTFT - queue - compute: all that is neither waiting for nor computing the prompt, before as well as after
    transfer = from the end of the last chunk's compute to the acknowledged commit; part of the overhead, mostly

Beside them, in the same run, one colocated worker with as many threads answers the same prompts.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.compare.engine_process import EngineFailed
from bench.compare.stack import Metrics, Stack, model_folder, running_stack
from bench.load.client import Client
from bench.load.exchange import HttpFailure
from bench.load.progress import Progress
from bench.load.report import align, write_json
from bench.load.text import PromptSource, documentation, tokenize_with
from shared.options.config import exit_on_config_error, option, parse_config

PROG = "python -m bench.handoff"
COLOCATED = "colocated"
TRANSPORTS = ("shm", "cuda-ipc", "grpc", "gloo", "nccl")
STAGES = ("queue", "compute", "transfer")
OUTPUT_TOKENS = 8
_NUM_WARM_UPS = 3
# Between a prompt and the longest sequence: the output, and what makes the last block a partial one, as most are.
_ROOM_TOKENS = 16


class MeasurementFailed(Exception):
    """A request failed, or did not go the way that was to be measured."""


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ValueError("it must list numbers of tokens, separated by commas")
    return lengths


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(TRANSPORTS):
        raise ValueError(f"it must list some of {', '.join(TRANSPORTS)}, separated by commas")
    return names


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    """Measures what handing a prompt over adds to the time to the first token."""

    lengths: tuple[int, ...] = option((512, 2048, 8192), "prompt tokens, shortened to what the model takes", parse=_lengths)
    transports: tuple[str, ...] = option(("shm", "grpc", "gloo"), f"some of {', '.join(TRANSPORTS)}", parse=_transports)
    repeats: int = option(3, "requests of each length; medians are shown")
    num_threads: int = option(1, "compute threads of each worker")
    model: str = option("", "folder with the model; default: SmolLM2-135M-Instruct, fetched once")
    seed: int | None = option(None, "seed of the prompts' cuts; default: another one every time")
    request_timeout_s: float = option(600.0, "after which a request counts as failed")
    json: str = option("", "also write every request's figures to this file")
    drawn_seed: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        for name in ("repeats", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")

    @property
    def prompt_seed(self) -> int:
        return self.drawn_seed if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class Stages:
    """Of one remote prefill, in seconds, as the prefill worker saw them."""

    queue_s: float
    compute_s: float
    transfer_s: float

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> Stages:
        """Raises MeasurementFailed unless exactly one prompt was handed over between the two readings."""
        counted = [_grown(before, after, "count", stage) for stage in STAGES]
        if counted != [1, 1, 1]:
            raise MeasurementFailed(f"one prompt should have been handed over, but the router counted {counted[0]:g}")
        return cls(*(_grown(before, after, "sum", stage) for stage in STAGES))


def _grown(before: Metrics, after: Metrics, what: str, stage: str) -> float:
    name = f"twostroke_prefill_seconds_{what}"
    return after.total(name, stage=stage) - before.total(name, stage=stage)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request."""

    way: str  # a transport, or colocated
    num_prompt_tokens: int
    ttft_s: float
    stages: Stages | None  # None: nothing was handed over

    @property
    def overhead_s(self) -> float:
        assert self.stages is not None, "a colocated worker's compute is not known apart"
        return self.ttft_s - self.stages.queue_s - self.stages.compute_s


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the requests of one length by one way; times in seconds, shares of the same request's TTFT."""

    way: str
    num_prompt_tokens: int
    ttft_s: float
    colocated_ttft_s: float
    compute_s: float | None = None
    overhead_s: float | None = None
    overhead_share: float | None = None
    transfer_s: float | None = None
    transfer_share: float | None = None


def summarize(samples: Sequence[Sample]) -> list[Row]:
    """A row for each length and way, in the order of the samples, grouped by length."""
    lengths = dict.fromkeys(sample.num_prompt_tokens for sample in samples)
    ways = dict.fromkeys(sample.way for sample in samples)
    return [_row([s for s in samples if (s.way, s.num_prompt_tokens) == (way, n)], samples) for n in lengths for way in ways]


def _row(group: Sequence[Sample], samples: Sequence[Sample]) -> Row:
    way, num_tokens = group[0].way, group[0].num_prompt_tokens
    ttft_s = statistics.median(s.ttft_s for s in group)
    colocated_s = statistics.median(s.ttft_s for s in samples if (s.way, s.num_prompt_tokens) == (COLOCATED, num_tokens))
    staged = [(s, s.stages) for s in group if s.stages is not None]
    if not staged:
        return Row(way, num_tokens, ttft_s, colocated_s)
    return Row(
        way,
        num_tokens,
        ttft_s,
        colocated_s,
        compute_s=statistics.median(stages.compute_s for _, stages in staged),
        overhead_s=statistics.median(s.overhead_s for s, _ in staged),
        overhead_share=statistics.median(s.overhead_s / s.ttft_s for s, _ in staged),
        transfer_s=statistics.median(stages.transfer_s for _, stages in staged),
        transfer_share=statistics.median(stages.transfer_s / s.ttft_s for s, stages in staged),
    )


def table(rows: Sequence[Row]) -> str:
    header = ["tokens", "by", "TTFT", "of colocated", "compute", "overhead", "of TTFT", "transfer", "of TTFT"]
    return "\n".join(align([header, *map(_cells, rows)]))


def _cells(row: Row) -> list[str]:
    own = [_ms(row.compute_s), _ms(row.overhead_s), _share(row.overhead_share), _ms(row.transfer_s), _share(row.transfer_share)]
    return [f"{row.num_prompt_tokens:,}", row.way, _ms(row.ttft_s), _share(row.ttft_s / row.colocated_ttft_s), *own]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


async def measure(config: HandoffConfig, folder: Path, progress: Progress) -> list[Sample]:
    """Raises MeasurementFailed, EngineFailed or HttpFailure."""
    token_ids = tokenize_with(folder, documentation())
    samples = []
    for way in (COLOCATED, *config.transports):
        shape = ("--colocated", "1") if way == COLOCATED else ("--prefill", "1", "--decode", "1", "--handoff", "always")
        transport = () if way == COLOCATED else ("--transport", way)
        progress.say(f"starting {way}")
        async with running_stack(f"handoff-{way}", folder, config.num_threads, *shape, *transport) as stack:
            samples += await _measure_stack(config, stack, way, token_ids, progress)
    return samples


async def _measure_stack(
    config: HandoffConfig, stack: Stack, way: str, token_ids: Sequence[int], progress: Progress
) -> list[Sample]:
    """Every way gets the same prompts in the same order, of which none is like another."""
    prompts = PromptSource(token_ids, config.prompt_seed)
    client = Client(stack.endpoint, stack.model, config.request_timeout_s, progress)
    lengths = tuple(dict.fromkeys(min(length, stack.max_model_len - _ROOM_TOKENS) for length in config.lengths))
    for _ in range(_NUM_WARM_UPS):
        await _ask(stack, client, way, prompts.cut(min(lengths)))
    progress.begin(f"{way}: {', '.join(map(str, lengths))} tokens", config.repeats * len(lengths))
    samples = [await _ask(stack, client, way, prompts.cut(length)) for _ in range(config.repeats) for length in lengths]
    progress.end()
    return samples


async def _ask(stack: Stack, client: Client, way: str, prompt: Sequence[int]) -> Sample:
    before = await stack.metrics()
    completion = await client.complete(prompt, OUTPUT_TOKENS)
    if not completion.is_good:
        raise MeasurementFailed(f"{way}, {len(prompt)} tokens: {completion.error}")
    stages = None if way == COLOCATED else Stages.between(before, await stack.metrics())
    return Sample(way, len(prompt), completion.ttft_s, stages)


def report_json(config: HandoffConfig, samples: Sequence[Sample]) -> dict[str, Any]:
    means = {"seed": config.prompt_seed, "num_threads": config.num_threads, "output_tokens": OUTPUT_TOKENS}
    return means | {"rows": [asdict(row) for row in summarize(samples)], "samples": [asdict(sample) for sample in samples]}


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError. Exit code 1 if anything could not be measured."""
    config = parse_config(HandoffConfig, argv, PROG)
    progress = Progress(sys.stderr)
    folder = model_folder(config.model, progress.say)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            samples = runner.run(measure(config, folder, progress))
    except (EngineFailed, HttpFailure, MeasurementFailed) as error:
        sys.exit(f"error: {error}")
    print(f"{folder.name}, {config.repeats} requests each, seed {config.prompt_seed}\n\n{table(summarize(samples))}")
    if config.json:
        write_json(Path(config.json), report_json(config, samples))


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
