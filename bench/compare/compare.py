"""`twostroke bench compare`: one sitting, one engine at a time, the same work for each.

    for each engine: start ─> ready ─> warm up ─> workloads ─> stop        then: side by side, and a file in bench/reports/

All engines get the same prompts. Figures of different sittings, machines or loads are not comparable; only ratios within one are.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import uvloop

from bench.compare.comparison import Entry, comparison_json, comparison_table
from bench.compare.config import CompareConfig
from bench.compare.engine_process import EngineFailed, running
from bench.compare.engines import Engine, Missing, engines_at
from bench.load.exchange import Endpoint
from bench.load.progress import Progress
from bench.load.report import write_json
from bench.load.session import ServerFailed, measure, served_model
from bench.load.text import documentation, tokenize_with
from shared.base.cache_dir import cache_dir
from shared.base.errors import ConfigError
from shared.models.fetch import fetch_default_model
from shared.options.config import exit_on_config_error, parse_config

_REPORTS = Path(__file__).parent / "reports"
_START_TIMEOUT_S = 1200.0  # an engine may compile kernels, or its model, first
# An engine that answers one request at a time never catches up with arrivals, and never runs 8 streams side by side.
_NOT_SERIAL = ("poisson", "pause")


def main(argv: Sequence[str]) -> None:
    config = parse_config(CompareConfig, argv, "twostroke bench compare", os.environ)
    progress = Progress(sys.stderr)
    config = replace(config, model=_model(config.model, progress))
    engines = _choose(config, progress)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        entries = runner.run(_sit(config, engines))
    _show(config, entries)
    if any(entry.report is None or entry.report.num_failed for entry in entries):
        sys.exit(1)


def _model(model: str, progress: Progress) -> str:
    if not model:
        return str(fetch_default_model(progress.say))
    if not Path(model).is_dir():
        raise ConfigError(f"--model is {model!r}, and there is no such folder; engines to compare need one that all can read")
    return str(Path(model).absolute())


def _choose(config: CompareConfig, progress: Progress) -> list[str]:
    """The names of the engines to run. Raises ConfigError if one that was asked for is missing."""
    found = engines_at(config, port=0)
    missing = [engine for engine in found if isinstance(engine, Missing)]
    for engine in missing:
        if config.engines is None:
            progress.say(f"without {engine.name}, for which {engine.variables} would have to be set")
        elif engine.name in config.engines:
            raise ConfigError(f"--engines names {engine.name}, for which {engine.variables} must be set")
    installed = [engine.name for engine in found if isinstance(engine, Engine)]
    return installed if config.engines is None else [name for name in installed if name in config.engines]


async def _sit(config: CompareConfig, names: Sequence[str]) -> list[Entry]:
    token_ids = tokenize_with(Path(config.model), documentation())
    return [await _run(_engine(config, name, port := _free_port()), config, port, token_ids) for name in names]


def _engine(config: CompareConfig, name: str, port: int) -> Engine:
    return next(engine for engine in engines_at(config, port) if isinstance(engine, Engine) and engine.name == name)


async def _run(engine: Engine, config: CompareConfig, port: int, token_ids: Sequence[int]) -> Entry:
    """A failing engine does not end the sitting."""
    progress = Progress(sys.stderr, prefix=f"{engine.name}: ")
    url = f"http://127.0.0.1:{port}"
    endpoint = Endpoint.parse(url, api_key="")
    work = _work_for(engine, config)
    if not work.workload:
        return Entry(engine, None, "answers one request at a time, which leaves no workload to run")
    progress.say("starting")
    try:
        async with running(engine, endpoint, cache_dir() / "bench" / f"{engine.name}.log", _START_TIMEOUT_S):
            model = await served_model(endpoint)
            return Entry(engine, await measure(work, endpoint, url, model, token_ids, progress))
    except (EngineFailed, ServerFailed, ConfigError) as error:
        progress.say(str(error))
        return Entry(engine, None, str(error))


def _work_for(engine: Engine, config: CompareConfig) -> CompareConfig:
    workloads = tuple(name for name in config.workloads if not (engine.is_serial and name in _NOT_SERIAL))
    return replace(config, workload=workloads, repeat=1 if engine.is_serial else config.repeat, seed=config.prompt_seed)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _show(config: CompareConfig, entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.report:
            print(f"{entry.engine.name}: {entry.report.table()}\n")
    print(comparison_table(entries))
    now = datetime.now().astimezone()
    path = Path(config.json) if config.json else _REPORTS / f"{now:%Y-%m-%dT%H%M%S}.json"
    sitting = {"at": now.isoformat(timespec="seconds"), "cpu": _cpu(), "num_cores": os.cpu_count(), "dtype": config.dtype}
    write_json(path, sitting | comparison_json(entries))
    print(f"\nwritten to {path}")


def _cpu() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
