"""Options of `twostroke bench`, and the names of its workloads."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shared.options.config import option

SCALING_STREAMS = (1, 8, 32)
DEFAULT_WORKLOADS = ("single", "mixed", "poisson", "prefix", "pause")
WORKLOADS = (*DEFAULT_WORKLOADS, "scaling")


def workload_names(text: str) -> tuple[str, ...]:
    """'mixed,pause' as names, in the order given. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise ValueError(f"it must list some of {', '.join(WORKLOADS)}, separated by commas")
    return names


@dataclass(frozen=True, slots=True)
class WorkConfig:
    """What work is done, whoever does it."""

    workload: tuple[str, ...] | None = option(
        None, f"comma-separated list of {', '.join(WORKLOADS)}; default: all but scaling", parse=workload_names
    )
    repeat: int = option(1, "runs of each workload; medians are shown")
    seed: int | None = option(None, "seed of the prompts' cuts; default: another one every time")
    num_requests: int = option(64, "mixed: requests in all")
    concurrency: int | None = option(None, "mixed: most requests at once; default: all of them")
    rate: float = option(1.0, "poisson: mean arrivals per second")
    duration_s: float = option(60.0, "poisson: how long requests arrive")
    prefix_tokens: int = option(1024, "prefix: tokens that all prompts share")
    question_tokens: int = option(32, "prefix: tokens of each prompt's own")
    long_prompt_tokens: int = option(4096, "pause: tokens of the prompt that arrives among running streams")
    request_timeout_s: float = option(600.0, "after which a request counts as failed")
    drawn_seed: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        for name in ("repeat", "num_requests", "concurrency", "prefix_tokens", "question_tokens", "long_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        for name in ("rate", "duration_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0")

    @property
    def workloads(self) -> tuple[str, ...]:
        return self.workload or DEFAULT_WORKLOADS

    @property
    def prompt_seed(self) -> int:
        return self.drawn_seed if self.seed is None else self.seed


@dataclass(frozen=True, slots=True)
class BenchConfig(WorkConfig):
    """Puts load on an OpenAI-compatible server and reports what its clients would feel."""

    url: str = option("http://127.0.0.1:8000", "the server, with or without /v1")
    model: str = option("", "name that the server knows the model by; default: the first it lists")
    tokenizer: str = option("", "folder with the model's tokenizer.json; default: the server tokenizes")
    api_key: str = option("", "key to send; better given in the environment", secret=True)
    json: str = option("", "file to write the results to")
