"""What clients feel when a worker is killed: the pause of running streams, and the time to the first token.

    python -m bench.failover [--kills 10] [--streams 4] [--time-limit-s 240] [--json FILE]

Two prefill and two decode workers serve steady streams. In turn, by SIGKILL, dies the decode worker that serves most of them, and a
prefill worker in the middle of a prompt. Every stream must get exactly the tokens of a run in which nobody died: exit code 1 if any
is lost, repeated or another one, or if a stream fails.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.compare.engine_process import EngineFailed
from bench.compare.stack import model_folder, running_stack
from bench.failover.rounds import DecodeKill, Job, PrefillKill, RoundFailed, Rounds, Verdict
from bench.failover.workers import WorkerLost, workers_of_stack
from bench.load.exchange import HttpFailure
from bench.load.measures import percentile
from bench.load.progress import Progress
from bench.load.report import align, write_json
from bench.load.text import PromptSource, documentation, tokenize_with
from shared.base.errors import ConfigError
from shared.options.config import exit_on_config_error, option, parse_config

PROG = "python -m bench.failover"
NUM_WORKERS_EACH = 2
_LONG_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class FailoverConfig:
    """Measures what clients feel when a decode or a prefill worker is killed."""

    kills: int = option(10, "how often a decode worker is killed, and as often a prefill worker")
    streams: int = option(4, "streams that run at each kill")
    prompt_tokens: int = option(128, "prompt of each stream")
    output_tokens: int = option(192, "output of each stream; it must go on for longer than it takes to start them all")
    long_prompt_tokens: int = option(300, "prompt that is being computed when a prefill worker is killed")
    num_threads: int = option(1, "compute threads of each worker")
    time_limit_s: float = option(240.0, "no further kill after this time")
    model: str = option("", "folder with the model; default: SmolLM2-135M-Instruct, fetched once")
    seed: int | None = option(None, "seed of the prompts' cuts; default: another one every time")
    json: str = option("", "also write every kill's figures to this file")
    drawn_seed: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        for name in ("kills", "streams", "prompt_tokens", "output_tokens", "long_prompt_tokens", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not self.time_limit_s > 0:
            raise ValueError(f"--time-limit-s is {self.time_limit_s}; it must be above 0")

    @property
    def prompt_seed(self) -> int:
        return self.drawn_seed if self.seed is None else self.seed

    def check_lengths(self, max_model_len: int) -> None:
        """Raises ConfigError."""
        if max(self.prompt_tokens + self.output_tokens, self.long_prompt_tokens + _LONG_OUTPUT_TOKENS) > max_model_len:
            raise ConfigError(
                f"prompts of {self.prompt_tokens} + {self.output_tokens} and {self.long_prompt_tokens} + {_LONG_OUTPUT_TOKENS} "
                f"tokens do not fit the model's {max_model_len}; choose shorter ones"
            )


@dataclass(frozen=True, slots=True)
class Findings:
    decode_kills: Sequence[DecodeKill]
    prefill_kills: Sequence[PrefillKill]

    @property
    def verdict(self) -> Verdict:
        return sum((kill.verdict for kills in (self.decode_kills, self.prefill_kills) for kill in kills), Verdict())

    @property
    def hits(self) -> list[PrefillKill]:
        return [kill for kill in self.prefill_kills if kill.is_hit]


async def measure(config: FailoverConfig, folder: Path, progress: Progress) -> Findings:
    """Raises EngineFailed, HttpFailure, RoundFailed, WorkerLost or ConfigError."""
    prompts = PromptSource(tokenize_with(folder, documentation()), config.prompt_seed)
    until = time.perf_counter() + config.time_limit_s
    progress.say("starting")
    shape = ("--prefill", str(NUM_WORKERS_EACH), "--decode", str(NUM_WORKERS_EACH), "--handoff", "always")
    async with running_stack("failover", folder, config.num_threads, *shape) as stack:
        config.check_lengths(stack.max_model_len)
        async with workers_of_stack(2 * NUM_WORKERS_EACH) as workers:
            await workers.all_alive()
            rounds = Rounds(stack, workers, *_jobs(config, prompts), salt=f"failover-{time.time_ns()}")
            return await _kill_in_turn(config, rounds, until, progress)


def _jobs(config: FailoverConfig, prompts: PromptSource) -> tuple[list[Job], Job]:
    """Of the streams, and of the long prompt."""
    streams = [Job(prompts.cut(config.prompt_tokens), config.output_tokens) for _ in range(config.streams)]
    return streams, Job(prompts.cut(config.long_prompt_tokens), _LONG_OUTPUT_TOKENS)


async def _kill_in_turn(config: FailoverConfig, rounds: Rounds, until: float, progress: Progress) -> Findings:
    """In turn, because a worker that is killed again soon after its start is kept down for longer by its supervisor."""
    progress.say("running undisturbed")
    await rounds.run_undisturbed()
    findings = Findings([], [])
    for number in range(1, config.kills + 1):
        if time.perf_counter() > until:
            progress.say(f"the time is up after {number - 1} kills of each")
            break
        progress.say(f"kills {number}/{config.kills}")
        findings = Findings(
            [*findings.decode_kills, await rounds.kill_decode()], [*findings.prefill_kills, await rounds.kill_prefill()]
        )
    return findings


def table(findings: Findings) -> str:
    decode, hits = findings.decode_kills, findings.hits
    rows = [
        ["decode worker killed", "streams", "p50", "p99", "max"],
        _row("  pause of its streams", [s for kill in decode for s in kill.pauses_s]),
        _row("  longest gap of the others", [s for kill in decode for s in kill.other_gaps_s]),
        _row("  (ITL before, median of each round)", [kill.itl_p50_s for kill in decode]),
        ["prefill worker killed", "prompts", "p50", "p99", "max"],
        _row("  TTFT undisturbed", [kill.undisturbed_ttft_s for kill in hits]),
        _row("  TTFT of the prompt it computed", [kill.ttft_s for kill in hits]),
        _row("  increase", [kill.ttft_s - kill.undisturbed_ttft_s for kill in hits]),
        _row("  longest gap of the streams beside", [s for kill in hits for s in kill.other_gaps_s]),
    ]
    return "\n".join([*align(rows), "", *_counts(findings)])


def _row(label: str, seconds: Sequence[float]) -> list[str]:
    if not seconds:
        return [label, "0", "-", "-", "-"]
    values = (percentile(seconds, 50), percentile(seconds, 99), max(seconds))
    return [label, str(len(seconds)), *(f"{1000 * value:,.0f} ms" for value in values)]


def _counts(findings: Findings) -> list[str]:
    verdict, num_missed = findings.verdict, len(findings.prefill_kills) - len(findings.hits)
    tokens = verdict.difference
    lines = [
        f"{len(findings.decode_kills)} decode and {len(findings.prefill_kills)} prefill workers killed; "
        f"{num_missed} of the latter too late to matter, and not in the table",
        f"{verdict.num_tokens:,} tokens compared: {tokens.num_lost} lost, {tokens.num_repeated} repeated, "
        f"{tokens.num_changed} changed; {len(verdict.errors)} streams failed",
    ]
    return [*lines, f"first error: {verdict.errors[0]}"] if verdict.errors else lines


def report_json(config: FailoverConfig, findings: Findings) -> dict[str, Any]:
    work = {name: getattr(config, name) for name in ("streams", "prompt_tokens", "output_tokens", "long_prompt_tokens")}
    means = {"seed": config.prompt_seed, "num_threads": config.num_threads}
    return work | means | {"is_good": findings.verdict.is_good} | asdict(findings)


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError."""
    config = parse_config(FailoverConfig, argv, PROG)
    progress = Progress(sys.stderr)
    folder = model_folder(config.model, progress.say)
    logging.getLogger("shared.index").setLevel(logging.ERROR)  # its warnings are of workers that are gone: here, on purpose
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            findings = runner.run(measure(config, folder, progress))
    except (EngineFailed, HttpFailure, RoundFailed, WorkerLost) as error:
        sys.exit(f"error: {error}")
    print(f"{folder.name}, {config.streams} streams, seed {config.prompt_seed}\n\n{table(findings)}")
    if config.json:
        write_json(Path(config.json), report_json(config, findings))
    if not findings.verdict.is_good:
        sys.exit(1)


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
