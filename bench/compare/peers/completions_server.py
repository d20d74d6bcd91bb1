"""The smallest HTTP server that the load generator can drive, with nothing but the standard library: other engines' environments
have only what the engine needs.

    GET /health, GET /v1/models, POST /v1/completions (token ids in, greedy, ignore_eos, streamed)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

MODEL_NAME = "model"
# From the prompt's ids and the number of tokens wanted: how many tokens came, again and again. Closing it ends the work.
Generate = Callable[[list[int], int], AsyncGenerator[int, None]]


async def serve(port: int, generate: Generate) -> None:
    """Until it is cancelled."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _answer(reader, writer, generate)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generate: Generate) -> None:
    path, body = await _read_request(reader)
    if path == "/v1/completions":
        await _complete(json.loads(body), writer, generate)
    elif path == "/v1/models":
        _write_json(writer, HTTPStatus.OK, {"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})
    elif path == "/health":
        _write_json(writer, HTTPStatus.OK, {"status": "ok"})
    else:
        _write_json(writer, HTTPStatus.NOT_FOUND, {"error": {"message": f"there is no {path}"}})
    await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Path and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *headers = head.split("\r\n")
    lengths = [value for name, _, value in (line.partition(":") for line in headers) if name.lower() == "content-length"]
    return request_line.split(" ")[1], await reader.readexactly(int(lengths[0]) if lengths else 0)


def _write_json(writer: asyncio.StreamWriter, status: HTTPStatus, content: object) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)


async def _complete(request: dict[str, Any], writer: asyncio.StreamWriter, generate: Generate) -> None:
    """The text of a token is a letter: nobody reads it, and no engine should pay for detokenizing here."""
    prompt, num_tokens = request["prompt"], 0
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    async with aclosing(generate(prompt, request["max_tokens"])) as steps:
        async for num_new in steps:
            num_tokens += num_new
            await _write_event(writer, json.dumps({"choices": [{"index": 0, "text": "x" * num_new, "finish_reason": None}]}))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
    await _write_event(writer, json.dumps({"choices": [], "usage": usage}))
    await _write_event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


async def _write_event(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
    await writer.drain()
