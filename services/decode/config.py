"""Options of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from shared.options.config import option
from shared.options.worker import WorkerConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """A Twostroke decode worker: takes prompts' KV blocks from prefill workers and generates."""

    colocated: bool = option(False, "take no handoffs: compute every prompt here, as the baseline of every comparison")
