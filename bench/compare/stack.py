"""Twostroke as `twostroke up` starts it on this machine, for measurements that look inside while it serves.

running_stack ─> ready ─> Stack: where it is, what it serves, what its router has counted ─> stopped, with all its workers
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.compare.engine_process import running
from bench.compare.engines import ROOT, Engine
from bench.load.client import fetch_json
from bench.load.exchange import Endpoint, exchange
from shared.base.cache_dir import cache_dir
from shared.base.errors import ConfigError
from shared.models.fetch import fetch_default_model

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0  # kernels may have to be compiled first
_KV_CACHE = "512MiB"  # of each worker: several of the longest prompts, and little of the machine


class Metrics:
    """One reading of a /metrics page."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels; 0 if there are none (yet)."""
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())


@dataclass(frozen=True, slots=True)
class Stack:
    endpoint: Endpoint
    model: str  # as clients name it
    max_model_len: int

    async def metrics(self) -> Metrics:
        """What the router has counted until now. Raises HttpFailure."""
        page = bytearray()
        await exchange(self.endpoint, "GET", "/metrics", b"", page.extend)
        return Metrics(page.decode())


@asynccontextmanager
async def running_stack(name: str, folder: Path, num_threads: int, *flags: str) -> AsyncIterator[Stack]:
    """`twostroke up` with `flags` and `num_threads` threads in each worker. Raises EngineFailed; its log is called `name`."""
    port = _free_port()
    endpoint = Endpoint(_HOST, port, is_tls=False, base_path="", api_key="")
    command = (sys.executable, "-m", "services.cli", "up", "--model", str(folder), "--port", str(port), *flags)
    means = ("--num-threads", str(num_threads), "--kv-cache-memory", _KV_CACHE)
    engine = Engine(name, (*command, *means), _environ(), "/ready", is_ours=True)
    async with running(engine, endpoint, cache_dir() / "bench" / f"{name}.log", _START_TIMEOUT_S):
        card = (await fetch_json(endpoint, "GET", "/v1/models"))["data"][0]
        yield Stack(endpoint, card["id"], card["max_model_len"])


def model_folder(model: str, say: Callable[[str], None]) -> Path:
    """The folder that --model names, or the default model's, fetched if need be. Raises ConfigError."""
    if not model:
        return fetch_default_model(say)
    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model is {model!r}; it must be a folder with a model's config.json")
    return folder


def _environ() -> dict[str, str]:
    """This process's environment without options, which are the measurement's own here and would be the server's there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTROKE_") or name == "TWOSTROKE_CACHE"}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        return int(probe.getsockname()[1])
