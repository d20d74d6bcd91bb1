"""transformers' `generate` behind /v1/completions, one request at a time: what a first script with a web server around it does."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.compare.peers.completions_server import serve


class _Tokens(BaseStreamer):
    """Hands each new token to the event loop: `generate` calls put() with the prompt first, then with every token."""

    def __init__(self) -> None:
        self.counts: asyncio.Queue[int] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._has_prompt = False

    def put(self, token_ids: torch.Tensor) -> None:
        if self._has_prompt:
            self._loop.call_soon_threadsafe(self.counts.put_nowait, token_ids.numel())
        self._has_prompt = True

    def end(self) -> None:
        pass


class OneAtATime:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._turn = asyncio.Lock()

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[int, None]:
        async with self._turn:
            is_unwanted = threading.Event()
            tokens = _Tokens()
            working = asyncio.create_task(asyncio.to_thread(self._work, prompt, num_tokens, tokens, is_unwanted))
            try:
                for _ in range(num_tokens):
                    yield await tokens.counts.get()
            finally:
                is_unwanted.set()
                await working

    def _work(self, prompt: list[int], num_tokens: int, tokens: _Tokens, is_unwanted: threading.Event) -> None:
        token_ids = torch.tensor([prompt])  # [1, num_tokens]
        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            streamer=tokens,
            stopping_criteria=[lambda ids, _: torch.full((ids.shape[0],), is_unwanted.is_set())],
        )


async def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, choices=["bfloat16", "float32"])
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--num-threads", required=True, type=int)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.num_threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    model.generation_config.eos_token_id = None  # ignore_eos
    await serve(options.port, OneAtATime(model).generate)


if __name__ == "__main__":
    asyncio.run(main())
