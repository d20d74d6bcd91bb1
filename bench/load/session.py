"""One sitting at one server.

which model ─> text as token ids ─> warm up ─> each workload, `repeat` times ─> report
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from bench.load.client import Client, fetch_json
from bench.load.config import BenchConfig, WorkConfig
from bench.load.exchange import Endpoint, HttpFailure
from bench.load.measures import Result, Run, summarize
from bench.load.progress import Progress
from bench.load.report import ClientCost, Report
from bench.load.text import PromptSource, documentation, tokenize_at, tokenize_with
from bench.load.workloads import Workload, make_workloads, warm_up
from shared.base.errors import ConfigError


class ServerFailed(Exception):
    """Not even the first requests succeeded."""


async def bench(config: BenchConfig, progress: Progress) -> Report:
    """Raises ConfigError if there is no server, or no way to make prompts for it, and ServerFailed."""
    endpoint = Endpoint.parse(config.url, config.api_key)
    model = config.model or await served_model(endpoint)
    texts = documentation()
    if config.tokenizer:
        token_ids = tokenize_with(Path(config.tokenizer), texts)
    else:
        token_ids = await tokenize_at(endpoint, model, texts)
    return await measure(config, endpoint, config.url, model, token_ids, progress)


async def served_model(endpoint: Endpoint) -> str:
    """The first model that the server lists. Raises ConfigError."""
    try:
        return str((await fetch_json(endpoint, "GET", "/v1/models"))["data"][0]["id"])
    except HttpFailure as failure:
        raise ConfigError(f"the server does not say which models it has: {failure}") from None
    except (KeyError, IndexError, TypeError):
        raise ConfigError("the server lists no model at /v1/models; name one with --model") from None


async def measure(
    work: WorkConfig, endpoint: Endpoint, url: str, model: str, token_ids: Sequence[int], progress: Progress
) -> Report:
    """`token_ids` is the text that prompts are cut from. Raises ServerFailed."""
    client = Client(endpoint, model, work.request_timeout_s, progress)
    prompts = PromptSource(token_ids, work.prompt_seed)
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    progress.say(f"warming up; seed {work.prompt_seed}")
    if error := await warm_up(client, prompts):
        raise ServerFailed(f"{url} does not serve {model!r}: {error}")
    cpu_s, elapsed_s, num_chunks = time.process_time(), time.perf_counter(), client.num_chunks
    results = [await _repeat(workload, work.repeat, client, prompts, progress) for workload in make_workloads(work)]
    cost = ClientCost(time.process_time() - cpu_s, time.perf_counter() - elapsed_s, client.num_chunks - num_chunks)
    return Report(url, model, work.prompt_seed, started_at, results, cost)


async def _repeat(workload: Workload, num_runs: int, client: Client, prompts: PromptSource, progress: Progress) -> Result:
    runs: list[Run] = []
    for number in range(1, num_runs + 1):
        progress.begin(f"{workload.name} {number}/{num_runs}", workload.num_requests)
        runs.append(await workload.run(client, prompts))
        progress.end()
    return summarize(workload.name, runs)
