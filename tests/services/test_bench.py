"""The load generator as a process against a small OpenAI-compatible server that answers at once, or wrongly when told to."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.load.client import Client, Completion, Observer
from bench.load.exchange import Endpoint
from bench.load.measures import GAP_OVER_ITL, ITL_BEFORE_P50, ITL_BEFORE_P99, LONG_TTFT, TTFT_P50, WORST_GAP, summarize
from bench.load.text import PromptSource
from bench.load.workloads import Lengths, Pause, at_once
from shared.base.errors import ConfigError
from tests.support.eventually import eventually

SEED = 11
TEXT = list(range(5000))


@dataclass
class FakeServer:
    """`failing`: from this request on, all fail. `freeze_s`: how long a prompt of 1,000 tokens stops all streams."""

    port: int = 0
    step_s: float = 0.0
    freeze_s: float = 0.0
    failing: int | None = None
    short_by: int = 0
    closes_early: bool = False
    model: str = "fake"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    num_disconnects: int = 0
    gpu: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
            body = await reader.readexactly(length)
            self.heads.append(head)
            await self.answer(head.split(" ")[1], json.loads(body) if body else {}, writer)
            await writer.drain()
        except ConnectionError:
            self.num_disconnects += 1
        finally:
            writer.close()

    async def answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            whole(writer, 200, {"data": [{"id": self.model}]})
        elif path == "/tokenize":
            whole(writer, 200, {"tokens": [ord(character) % 1000 for character in body["prompt"]]})
        elif path == "/v1/completions":
            self.bodies.append(body)
            if self.failing is not None and len(self.bodies) > self.failing:
                whole(writer, 429, {"error": {"message": "too busy", "code": "x"}})
            else:
                self.num_running += 1
                self.most_running = max(self.most_running, self.num_running)
                try:
                    await self.stream(body, writer)
                finally:
                    self.num_running -= 1
        else:
            whole(writer, 404, {"error": {"message": "no such path"}})

    async def stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        num_tokens = body["max_tokens"] - self.short_by
        if len(body["prompt"]) >= 1000:
            async with self.gpu:
                await asyncio.sleep(self.freeze_s)
        for _ in range(num_tokens):
            async with self.gpu:
                pass
            await asyncio.sleep(self.step_s)
            event(writer, {"choices": [{"index": 0, "text": "a", "finish_reason": None}], "usage": None})
            await writer.drain()
        if self.closes_early:
            return
        event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": None})
        event(writer, {"choices": [], "usage": {"completion_tokens": num_tokens}})
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def whole(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def event(writer: asyncio.StreamWriter, content: object) -> None:
    """In two pieces: an event does not have to come as one."""
    data = f"data: {json.dumps(content)}\n\n".encode()
    chunk(writer, data[:9])
    chunk(writer, data[9:])


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@asynccontextmanager
async def serving(**behaviour: Any) -> AsyncIterator[FakeServer]:
    fake = FakeServer(**behaviour)
    server = await asyncio.start_server(fake.connected, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    async with server:
        yield fake


async def bench(*argv: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTROKE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        "bench",
        "--seed",
        str(SEED),
        *argv,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=kept | environ,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def client_of(fake: FakeServer) -> Client:
    return Client(Endpoint.parse(fake.url, ""), fake.model, timeout_s=30.0, observer=Observer())


def prompts() -> PromptSource:
    return PromptSource(TEXT, SEED)


async def test_a_bench_reports_a_table_and_json(tmp_path: Path):
    async with serving() as fake:
        path = tmp_path / "out.json"
        workloads = ("--workload", "single,mixed,poisson,prefix", "--rate", "40", "--duration-s", "0.3")
        code, out, err = await bench("--url", f"{fake.url}/v1", *workloads, "--repeat", "2", "--json", str(path))
    assert (code, err.count("error")) == (0, 0), err
    found = {row["workload"]: row for row in json.loads(path.read_text())["workloads"]}
    assert [(name, row["requests"], row["failed"]) for name, row in found.items() if name != "poisson"] == [
        ("single", 2, 0),
        ("mixed", 128, 0),
        ("prefix", 32, 0),
    ]
    assert found["poisson"]["elapsed_s"] > 0.2
    assert {"cold_ttft_s", "warm_ttft_p50_s", "cold_over_warm"} <= found["prefix"].keys()
    assert all(row["itl_p50_s"] <= row["itl_p99_s"] <= row["itl_max_s"] for row in found.values())
    assert f"fake at {fake.url}/v1, seed {SEED}" in out
    assert [name for name in found if f"\n{name} " not in out] == []
    assert "cold TTFT" in out
    assert "seed 11" in err


async def test_requests_are_greedy_streamed_token_ids_and_bear_the_key(monkeypatch: pytest.MonkeyPatch):
    async with serving() as fake:
        code, *_ = await bench("--url", fake.url, "--workload", "prefix", TWOSTROKE_API_KEY="sesame", TWOSTROKE_MODEL="/a/folder")
    assert code == 0
    assert [head for head in fake.heads if "Authorization: Bearer sesame\r\n" not in head] == []
    asked = fake.bodies[-16:]
    for body in asked:
        assert (body["model"], body["temperature"], body["ignore_eos"], body["stream"]) == ("fake", 0, True, True)
        assert len(body["prompt"]) == 1024 + 32
        assert body["max_tokens"] == 16
    assert len({tuple(body["prompt"][:1024]) for body in asked}) == 1
    assert len({tuple(body["prompt"][1024:]) for body in asked}) > 1


async def test_a_failed_request_shows_its_error_and_gives_exit_code_1():
    num_warm_up = 9
    async with serving(failing=num_warm_up + 3) as fake:
        code, out, _ = await bench("--url", fake.url, "--workload", "mixed", "--num-requests", "10", "--concurrency", "1")
    assert code == 1
    assert "first error: HTTP 429: too busy" in out
    assert out.splitlines()[3].split()[:4] == ["mixed", "1", "10", "7"]


async def test_a_server_that_fails_from_the_start_gives_one_line_and_exit_code_1():
    async with serving(failing=0) as fake:
        code, out, err = await bench("--url", fake.url)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"error: {fake.url} does not serve 'fake': HTTP 429: too busy"


@pytest.mark.parametrize("argv", [("--url", "http://127.0.0.1:9"), ("--workload", "x"), ("--tokenizer", "/no/such")])
async def test_a_users_mistake_is_one_line_and_exit_code_2(argv: tuple[str, ...]):
    code, out, err = await bench("--model", "m", *argv)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")


async def test_concurrency_bounds_the_requests_at_once():
    async with serving(step_s=0.001) as fake:
        run = await at_once(client_of(fake), prompts(), [Lengths(10, 5)] * 12, concurrency=3)
    assert len(run.completions) == 12
    assert all(completion.is_good for completion in run.completions)
    assert fake.most_running == 3


async def test_each_chunk_is_stamped_when_it_arrives():
    async with serving(step_s=0.02) as fake:
        completion = await client_of(fake).complete(TEXT[:10], 6)
    assert len(completion.arrived_at) == completion.num_output_tokens == 6
    assert completion.ttft_s >= 0.019
    assert completion.ttft_s + sum(completion.gaps_s) >= 6 * 0.019
    assert completion.arrived_at == sorted(set(completion.arrived_at))


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"short_by": 2}, "4 tokens came of 6"),
        ({"closes_early": True}, "closed the connection before the end"),
        ({"failing": 0}, "HTTP 429: too busy"),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure(behaviour: dict[str, Any], words: str):
    async with serving(**behaviour) as fake:
        completion = await client_of(fake).complete(TEXT[:10], 6)
    assert words in completion.error
    assert not completion.is_good


async def test_a_request_that_takes_too_long_is_a_failure():
    async with serving(step_s=30.0) as fake:
        client = Client(Endpoint.parse(fake.url, ""), "fake", timeout_s=0.05, observer=Observer())
        completion = await client.complete(TEXT[:10], 6)
    assert completion.error == "not finished after 0.05 s"


FREEZE_S = 0.4


async def test_pause_finds_how_long_a_long_prompt_stops_the_streams():
    async with serving(step_s=0.01, freeze_s=FREEZE_S) as fake:
        pause = Pause(1000, num_streams=3, num_settling_chunks=3, undisturbed_s=0.2, afterwards_s=0.1)
        run = await pause.run(client_of(fake), prompts())
    result = summarize("pause", [run])
    assert (result.num_requests, result.num_failed) == (4, 0)
    # Lower bounds only: a busy machine makes everything later, nothing earlier.
    assert result.values[WORST_GAP] >= 0.5 * FREEZE_S  # its beginning may be seen late
    assert result.values[LONG_TTFT] >= 0.9 * FREEZE_S
    assert result.values[ITL_BEFORE_P50] >= 0.009
    assert result.values[GAP_OVER_ITL] == pytest.approx(result.values[WORST_GAP] / result.values[ITL_BEFORE_P99])
    streams_ttft_s = [completion.ttft_s for completion in run.completions]
    assert (len(streams_ttft_s), result.values[TTFT_P50]) == (3, sorted(streams_ttft_s)[1])  # the long prompt's is not among them


async def test_pause_fails_if_the_streams_end_before_the_long_prompt():
    async with serving() as fake:
        pause = Pause(1000, num_streams=2, stream=Lengths(10, 5), num_settling_chunks=3, undisturbed_s=5.0)
        result = summarize("pause", [await pause.run(client_of(fake), prompts())])
    assert result.num_failed == result.num_requests == 3
    assert "ended before the long prompt" in result.first_error
    assert WORST_GAP not in result.values


async def test_pause_reports_the_error_that_ended_a_stream():
    async with serving(failing=1, step_s=0.01) as fake:
        pause = Pause(1000, num_streams=2, undisturbed_s=5.0)
        result = summarize("pause", [await pause.run(client_of(fake), prompts())])
    assert result.first_error == "HTTP 429: too busy"


async def test_a_cancelled_completion_keeps_what_came_and_closes_its_connection():
    async with serving(step_s=0.005) as fake:
        completion, has_some = Completion(10, 10_000), asyncio.Event()
        running = asyncio.create_task(client_of(fake).run(completion, TEXT[:10], lambda _: has_some.set()))
        await has_some.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert completion.is_good
        await eventually(lambda: fake.num_disconnects == 1)  # it notices when it writes


@pytest.mark.parametrize(
    ("url", "host", "port", "base_path"),
    [
        ("http://h", "h", 80, ""),
        ("https://h/v1/", "h", 443, ""),
        ("http://[::1]:9/proxy/v1", "::1", 9, "/proxy"),
    ],
)
def test_urls_are_read_with_and_without_v1(url: str, host: str, port: int, base_path: str):
    endpoint = Endpoint.parse(url, "")
    assert (endpoint.host, endpoint.port, endpoint.base_path) == (host, port, base_path)


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:99999"])
def test_a_url_that_is_none_is_named(url: str):
    with pytest.raises(ConfigError, match=r"--url is"):
        Endpoint.parse(url, "")
