"""Options of `twostroke up`: every option of a worker, how many of each, and where the router listens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from shared.options.checks import check_at_least
from shared.options.config import option
from shared.options.worker import WorkerConfig

# Nothing outside this machine reaches the workers, so a stop need not wait long for their streams.
_DRAIN_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class UpConfig(WorkerConfig):
    """Serves on this machine: Valkey, workers and a router, supervised. Options of a worker go to every worker."""

    model: str = option("", "folder with a model, .gguf file or hub id; default: SmolLM2-135M-Instruct, fetched once")
    tokenizer: str = option("", "folder, .gguf file or hub id with the tokenizer; default: the model's own")
    prefill: int | None = option(None, "prefill workers; default: 1, or 0 with --colocated")
    decode: int | None = option(None, "decode workers; default: 1, or 0 with --colocated")
    colocated: int = option(0, "workers that do both phases, as the baseline to compare with")
    host: str = option("127.0.0.1", "address of the HTTP server, IPv4 or IPv6")
    port: int = option(8000, "port of the HTTP server; 0 picks a free one")
    api_key: str = option("", "key that clients must send; default: none needed", secret=True)
    handoff: str = option(
        "auto", "when prefill workers compute prompts: auto, where it pays, or always", choices=("auto", "always")
    )
    redis_url: str = option("", "Redis or Valkey to use instead of an embedded one", secret=True)
    metrics_port: int | None = option(None, "first worker's /metrics port; the next workers take the next ports; default: off")
    drain_timeout_s: float = option(_DRAIN_TIMEOUT_S, "at a stop, how long running sequences may go on")
    # Each worker's own affair here, so no flags.
    advertise: str = ""
    worker_id: str = ""

    def __post_init__(self) -> None:
        super(UpConfig, self).__post_init__()
        check_at_least(0, self, "prefill", "decode", "colocated")
        if self.num_decode + self.colocated == 0:
            raise ValueError("--decode and --colocated are both 0; somebody must generate")

    @property
    def num_prefill(self) -> int:
        return int(self.colocated == 0) if self.prefill is None else self.prefill

    @property
    def num_decode(self) -> int:
        return int(self.colocated == 0) if self.decode is None else self.decode

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.colocated

    def worker(self, **own: Any) -> WorkerConfig:
        """The options to hand on, with those that differ between workers given in `own`."""
        handed_on = {f.name: getattr(self, f.name) for f in fields(WorkerConfig)}
        return WorkerConfig(**handed_on | {"host": "127.0.0.1", "port": 0} | own)
