"""The router's HTTP server with a backend that is told what to say."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer

from services.router.config import RouterConfig
from services.router.dispatch.model_pool import ModelPool
from services.router.http.app import create_app
from services.router.http.catalog import Catalog, ServedModel
from services.router.http.server import HttpServer
from services.router.http.stopping import Stopping
from services.router.text.tokenizer import ChatTokenizer
from shared.base.errors import TwostrokeError, Unavailable
from shared.base.request import FinishReason, Output, Request, Token
from tests.support.tiny_tokenizer import EOS_ID

MODEL = "tiny"
MAX_MODEL_LEN = 200


@dataclass
class Script:
    """What the backend says to every request."""

    text: str = "one two three"
    reason: FinishReason = FinishReason.STOP
    tokens_per_output: int = 1
    num_cached_tokens: int = 0
    error: TwostrokeError | Exception | None = None
    error_after: int = 0  # outputs before the error
    hang_after: int | None = None  # outputs before silence
    is_endless: bool = False  # the first output again and again
    not_ready: str | None = None


@dataclass
class FakeBackend:
    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    requests: list[Request] = field(default_factory=list)
    deadlines_s: list[float] = field(default_factory=list)
    pools: dict[str, ModelPool] = field(default_factory=lambda: {MODEL: ModelPool(MODEL, "", "", MAX_MODEL_LEN, 8)})
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: list[int] = field(default_factory=list)  # choices
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    closed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def generate(self, request: Request, deadline_s: float) -> FakeGeneration:
        self.requests.append(request)
        self.deadlines_s.append(deadline_s)
        return FakeGeneration(self, self.script, request)

    def is_ready(self, model: str = "") -> str | None:
        return self.script.not_ready

    def models(self) -> dict[str, ModelPool]:
        return {} if self.script.not_ready else self.pools

    async def wait_for_change(self) -> None:
        await self.changed.wait()
        self.changed.clear()

    def max_model_len(self, model: str) -> int:
        if self.script.not_ready:
            raise Unavailable(self.script.not_ready)
        if model not in self.pools:
            raise Unavailable(f"no worker of model {model!r}")
        return self.pools[model].max_model_len

    def say(self, **fields: Any) -> None:
        self.script = Script(**fields)
        self.requests.clear()
        self.deadlines_s.clear()
        self.stopped.clear()


class FakeGeneration:
    """Says the script's text, the choices in turn. Every choice has the same tokens; token i has logprob -i / 8."""

    def __init__(self, backend: FakeBackend, script: Script, request: Request) -> None:
        self._backend, self._script, self._request = backend, script, request
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        self._backend.started.release()
        first = next(self._outputs())
        while self._script.is_endless:
            yield first
            await asyncio.sleep(0)
        for i, output in enumerate(self._outputs()):
            if self._script.error is not None and i >= self._script.error_after:
                raise self._script.error
            if self._script.hang_after is not None and i >= self._script.hang_after:
                await asyncio.Event().wait()
            yield output

    def _outputs(self) -> Iterator[Output]:
        sampling = self._request.sampling
        ids = self._backend.tokenizer.encode(self._script.text).ids
        ids = ids[: sampling.max_tokens] if self._script.reason is FinishReason.LENGTH else [*ids, EOS_ID]
        k = sampling.num_logprobs
        tokens = [
            Token(i, t, None if k is None else -i / 8, tuple((t + j, -i / 8 - j) for j in range(k or 0))) for i, t in enumerate(ids)
        ]
        step = self._script.tokens_per_output
        for start in range(0, len(tokens), step):
            for choice in range(sampling.n):
                output = Output(self._request.request_id, choice, tuple(tokens[start : start + step]))
                if start == 0:
                    output = replace(output, num_cached_tokens=self._script.num_cached_tokens)
                yield output if start + step < len(tokens) else replace(output, finish_reason=self._script.reason)

    def stop_choice(self, choice: int) -> None:
        self._backend.stopped.append(choice)

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._backend.closed.release()


class Service:
    """A server in a thread of its own."""

    def __init__(
        self,
        tokenizer: ChatTokenizer | None,
        raw: Tokenizer,
        load: Callable[[ModelPool], ChatTokenizer] = lambda pool: ChatTokenizer.load(pool.source, pool.revision),
        **settings: Any,
    ) -> None:
        """`tokenizer`: of the router's own model, if it has one; `raw`: the same, for the backend; `load`: of other models."""
        self.backend = FakeBackend(raw)
        self._load = load
        self._tokenizer = tokenizer
        self._config = RouterConfig(served_model_name=MODEL, **settings)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # a client that does not read is soon noticed
        self._is_made = threading.Event()
        self.port: int = self._listener.getsockname()[1]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._is_made.wait(20)

    async def _serve(self) -> None:
        stopping = Stopping()
        own = None if self._tokenizer is None else ServedModel(MODEL, self._tokenizer)
        self.catalog = Catalog(self.backend, self._load, max_models=self._config.max_models, own=own)
        self.catalog.start()
        app = create_app(self._config, self.backend, self.catalog, stopping)
        self._server = HttpServer(app, self._config, stopping)
        self._loop = asyncio.get_running_loop()
        self._is_made.set()
        await self._server.serve(self._listener)
        await self.catalog.stop()

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, max_retries=0, timeout=20)

    def connect(self, sent: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        """A raw connection."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def accepted_sockets(self) -> list[Any]:
        """Those of all connections, as the server has them."""
        connections: Any = list(self._server.connections)
        return [connection.transport.get_extra_info("socket") for connection in connections]

    def is_a_client_stuck(self) -> bool:
        return any(connection.is_stuck for connection in list(self._server.connections))

    def metric(self, sample: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    def serve_models(self, *pools: ModelPool) -> None:
        """As if exactly these had workers now."""

        def change() -> None:
            self.backend.pools = {pool.name: pool for pool in pools}
            self.backend.changed.set()

        self._loop.call_soon_threadsafe(change)

    def begin_stop(self) -> None:
        """As a signal does."""
        self._loop.call_soon_threadsafe(self._server.stop)

    def wait_stopped(self) -> None:
        self.http.close()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.begin_stop()
        self.begin_stop()
        self.wait_stopped()
