"""OpenVINO GenAI's continuous batching behind /v1/completions. Runs in an environment with openvino-genai, and needs nothing else.

    HTTP, event loop ── (id, prompt, n) ──> engine process: add, step, step, …
                     <── (id, tokens) ────

The pipeline holds the interpreter's lock while it computes, so it has a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.compare.peers.completions_server import serve

_MAX_NUM_BATCHED_TOKENS = 256  # its default, named because it sets how long a prompt stops streams
_PRECISION = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Ask:
    """A request, or with an empty prompt the wish to end it."""

    request_id: int
    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True)
class News:
    """Tokens that came since the last news of the request."""

    request_id: int
    num_tokens: int


_READY = News(0, 0)


class EngineLoop:
    """Lives in the engine process: takes new requests whenever there are some, and steps whenever there is work."""

    def __init__(self, options: argparse.Namespace, asks: Connection, news: Connection) -> None:
        self._openvino = import_module("openvino")  # by name: the project's own environment has neither
        self._genai = import_module("openvino_genai")
        self._pipeline = _pipeline(self._genai, options)
        self._asks = asks
        self._news = news
        self._handles: dict[int, Any] = {}
        self._num_left: dict[int, int] = {}
        news.send(_READY)

    def run(self) -> None:
        while True:
            while self._asks.poll(None if not self._handles else 0):
                self._take(self._asks.recv())
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            for request_id in list(self._handles):
                self._tell(request_id)

    def _take(self, ask: Ask) -> None:
        if not ask.prompt:
            if handle := self._handles.pop(ask.request_id, None):
                del self._num_left[ask.request_id]
                handle.cancel()
            return
        generation = self._genai.GenerationConfig(max_new_tokens=ask.num_tokens, ignore_eos=True, do_sample=False)
        prompt = self._openvino.Tensor(np.array([ask.prompt], dtype=np.int64))  # [1, num_tokens]
        self._handles[ask.request_id] = self._pipeline.add_request(ask.request_id, prompt, generation)
        self._num_left[ask.request_id] = ask.num_tokens

    def _tell(self, request_id: int) -> None:
        """What the last step gave this request."""
        handle = self._handles[request_id]
        while handle.can_read():
            for output in handle.read().values():
                if num_new := len(output.generated_ids):
                    self._num_left[request_id] -= num_new
                    self._news.send(News(request_id, num_new))
        if self._num_left[request_id] <= 0:
            del self._handles[request_id], self._num_left[request_id]


def run_engine(options: argparse.Namespace, asks: Connection, news: Connection) -> None:
    EngineLoop(options, asks, news).run()


def _pipeline(genai: Any, options: argparse.Namespace) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options.kv_cache_gib
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = _MAX_NUM_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": options.num_threads, "INFERENCE_PRECISION_HINT": _PRECISION[options.dtype]}
    return genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)


class RemoteEngine:
    """The event loop's side of the two pipes."""

    def __init__(self, asks: Connection, news: Connection) -> None:
        self._asks = asks
        self._news = news
        self._ids = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[int]] = {}
        asyncio.get_running_loop().add_reader(news.fileno(), self._read)

    def _read(self) -> None:
        try:
            news = self._news.recv()
        except EOFError:
            raise SystemExit("the engine process ended") from None
        if queue := self._queues.get(news.request_id):
            queue.put_nowait(news.num_tokens)

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[int, None]:
        request_id = next(self._ids)
        queue = self._queues[request_id] = asyncio.Queue()
        self._asks.send(Ask(request_id, prompt, num_tokens))
        num_left = num_tokens
        try:
            while num_left > 0:
                num_new = await queue.get()
                num_left -= num_new
                yield num_new
        finally:
            del self._queues[request_id]
            if num_left > 0:
                self._asks.send(Ask(request_id, [], 0))


async def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    asks_in_engine, asks = multiprocessing.Pipe(duplex=False)
    news, news_in_engine = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=run_engine, args=(options, asks_in_engine, news_in_engine), daemon=True).start()
    news_in_engine.close()  # so that the end of the engine is the end of its news
    news.recv()
    await serve(options.port, RemoteEngine(asks, news).generate)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, choices=list(_PRECISION))
    for number in ("--port", "--num-threads", "--max-num-seqs", "--kv-cache-gib"):
        parser.add_argument(number, required=True, type=int)
    return parser.parse_args(argv)


if __name__ == "__main__":
    asyncio.run(main())
