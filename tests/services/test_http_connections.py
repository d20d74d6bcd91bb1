"""The router's connections as hostile, slow and leaving clients use them: a real server and raw sockets."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Iterator
from functools import partial

import pytest
from tokenizers import Tokenizer

from services.router.http import limits, server, sse
from services.router.http.protocol import ConnectionLimits
from services.router.text.tokenizer import ChatTokenizer
from tests.support.eventually import eventually
from tests.support.http_service import MODEL, Service

SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.randrange(2**32)
SHORT_S = 0.3
IN_FLIGHT = "twostroke_http_requests_in_flight"
STUCK = "twostroke_http_clients_stuck_total"


@pytest.fixture(scope="module")
def shared_service(tokenizer: ChatTokenizer, raw: Tokenizer) -> Iterator[Service]:
    """One that waits only shortly for what must come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "ConnectionLimits", partial(ConnectionLimits, head_timeout_s=SHORT_S))
        patch.setattr(limits, "BODY_TIMEOUT_S", SHORT_S)
        service = Service(tokenizer, raw)
        yield service
        service.stop()


@pytest.fixture
def service(shared_service: Service) -> Service:
    shared_service.backend.say()
    return shared_service


def request_bytes(path: str = "/v1/completions", *headers: str, **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "x"} | fields)
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    try:
        while part := connection.recv(2**16):
            data += part
    except ConnectionResetError:
        pass
    return data


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


# Heads


@pytest.mark.parametrize(
    ("head", "status", "reason"),
    [
        (b"GET /health HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\nA: " + b"x" * 1_000_000, 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431, "head_too_large"),
        (b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 102, 431, "head_too_large"),
        (b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\n\r\n", 414, "uri_too_long"),
        (b"GET /" + b"x" * 1_000_000, 414, "uri_too_long"),
        (b"GET /health HTTP/1.1\r\nA: b\r\n", 408, "head_timeout"),
        (b"\x16\x03\x01\x02\x00", 400, "malformed"),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "malformed"),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "malformed"),
    ],
)
def test_a_head_beyond_its_bounds_is_refused_by_status_and_counted(service: Service, head: bytes, status: int, reason: str) -> None:
    sample = f'twostroke_http_requests_refused_total{{reason="{reason}"}}'
    before = service.metric(sample)
    with service.connect() as connection:
        connection.sendall(head)
        answer = read_all(connection)
    assert statuses(answer) == [status]
    head_lines, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head_lines
    assert b"x-request-id: " in head_lines
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert service.metric(sample) == before + 1


def test_a_head_within_its_bounds_is_served_however_it_comes(service: Service) -> None:
    head = (
        b"GET /health HTTP/1.1\r\n" + b"".join(b"A%d: %s\r\n" % (i, b"x" * 600) for i in range(98)) + b"Connection: close\r\n\r\n"
    )
    with service.connect(head) as connection:
        assert statuses(read_all(connection)) == [200]
    with service.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(head), 2_000):
            connection.sendall(head[start : start + 2_000])
        assert statuses(read_all(connection)) == [200]


def test_connections_beyond_the_limit_get_503_and_a_place_is_free_when_one_closes(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, max_connections=2)
    try:
        first = service.connect(b"GET /health HTTP/1.1\r\n\r\n")
        assert statuses(first.recv(1000)) == [200]
        second = service.connect(b"GET /health HTTP/1.1\r\n\r\n")
        assert statuses(second.recv(1000)) == [200]
        with service.connect() as third:
            assert statuses(read_all(third)) == [503]
        first.close()
        second.close()

        def is_served() -> bool:
            with service.connect(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n") as connection:
                return statuses(read_all(connection)) == [200]

        for _ in range(100):
            if is_served():
                break
        else:
            raise AssertionError("no place was given back")
    finally:
        service.stop()


def test_an_idle_connection_is_kept_for_the_keep_alive_timeout_only(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, keep_alive_timeout_s=0.2)
    try:
        with service.connect(b"GET /health HTTP/1.1\r\n\r\n") as used, service.connect() as unused:
            assert statuses(read_all(used)) == [200]  # and then it is closed
            assert read_all(unused) == b""
    finally:
        service.stop()


def test_pipelined_requests_are_answered_in_order_and_too_many_end_the_connection(service: Service) -> None:
    paths = ["/health", "/nowhere", "/ready", "/health"]
    with service.connect(b"".join(f"GET {path} HTTP/1.1\r\n\r\n".encode() for path in paths)) as connection:
        found = b""
        while len(statuses(found)) < len(paths):
            found += connection.recv(2**16)
        assert statuses(found) == [200, 404, 200, 200]
    service.backend.say(hang_after=0)
    with service.connect(request_bytes() + b"GET /health HTTP/1.1\r\n\r\n" * 100) as connection:
        assert read_all(connection) == b""
    assert service.metric(IN_FLIGHT) == 0


def test_a_client_that_leaves_with_requests_pipelined_ends_the_one_under_way(service: Service) -> None:
    service.backend.say(hang_after=2)
    while service.backend.closed.acquire(blocking=False):
        pass
    connection = service.connect(request_bytes(stream=True))
    connection.recv(1000)
    connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
    connection.close()
    assert service.backend.closed.acquire(timeout=10)


# Writing


def test_what_is_written_goes_out_at_once(service: Service) -> None:
    with service.connect(b"GET /health HTTP/1.1\r\n\r\n") as connection:
        assert statuses(connection.recv(1000)) == [200]
        [accepted] = [each for each in service.accepted_sockets() if each.getpeername() == connection.getsockname()]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_streams_of_clients_that_do_not_read_end_with_their_deadline(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, request_timeout_s=3, max_concurrent_requests=8)
    connections = []
    try:
        before = service.metric(STUCK)
        service.backend.say(text="word " * 500, tokens_per_output=500, is_endless=True)
        connections = [service.connect(request_bytes(stream=True), receive_buffer=4096) for _ in range(8)]
        for _ in connections:
            assert service.backend.started.acquire(timeout=10)
        assert service.http.post("/v1/completions", json={"prompt": "x", "model": MODEL}).status_code == 429
        await eventually(lambda: service.metric(IN_FLIGHT) == 0)
        await eventually(lambda: service.metric(STUCK) == before + 8)
        service.backend.say()
        assert service.http.post("/v1/completions", json={"prompt": "x", "model": MODEL}).status_code == 200
        assert len(service._server.connections) == 1  # that of the request before
    finally:
        for connection in connections:
            connection.close()
        service.stop()


async def test_an_answer_that_is_not_read_is_dropped_in_time(tokenizer: ChatTokenizer, raw: Tokenizer) -> None:
    service = Service(tokenizer, raw, request_timeout_s=1)
    try:
        before = service.metric(STUCK)
        for more in ((), ("Connection: close",)):
            connection = service.connect(request_bytes("/tokenize", *more, prompt="word " * 40_000), receive_buffer=4096)
            await eventually(lambda count=before + 1: service.metric(STUCK) == count)  # type: ignore[misc]
            before += 1
            assert len(service._server.connections) == 1
            connection.close()
    finally:
        service.stop()


async def test_a_client_that_leaves_while_a_write_waits_for_it_gives_its_place_back(service: Service) -> None:
    service.backend.say(text="word " * 500, tokens_per_output=500, is_endless=True)
    while service.backend.closed.acquire(blocking=False):
        pass
    connection = service.connect(request_bytes(stream=True), receive_buffer=4096)
    await eventually(service.is_a_client_stuck)
    assert service.metric(IN_FLIGHT) == 1
    connection.close()
    assert service.backend.closed.acquire(timeout=10)
    await eventually(lambda: service.metric(IN_FLIGHT) == 0)


def test_a_stream_that_says_nothing_is_kept_alive_by_comments_and_its_error_is_an_event(
    tokenizer: ChatTokenizer, raw: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "FIRST_COMMENT_AFTER_S", 0.05)
    monkeypatch.setattr(sse, "COMMENT_EVERY_S", 0.1)
    service = Service(tokenizer, raw, request_timeout_s=1)
    try:
        service.backend.say(hang_after=0)
        answer = service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})
        assert answer.status_code == 200
        *comments, error, end = answer.text.split("\n\n")
        assert set(comments) == {": keep-alive"}
        assert 3 <= len(comments) <= 11
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "timeout_error"
        assert end == ""
        whole = service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")
    finally:
        service.stop()


# Nonsense

ALLOWED = {200, 400, 404, 405, 408, 413, 414, 415, 431}


def nonsense(rng: random.Random) -> bytes:
    """A request with little or much wrong."""
    right = request_bytes(stream=rng.random() < 0.5, max_tokens=3)
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.choice([1, 10, 1000, 100_000]))
    if kind == 1:  # some bytes changed
        changed = bytearray(right)
        for _ in range(rng.randrange(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 2:  # cut off
        return right[: rng.randrange(1, len(right))]
    if kind == 3:  # chunked, with sizes that are wrong
        head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = [b"%x\r\n%s\r\n" % (rng.choice([0, 1, 5, 2**40]), rng.randbytes(rng.randrange(8))) for _ in range(3)]
        return head + b"".join(chunks)
    if kind == 4:  # pipelined with something else
        return right + nonsense(rng)
    method = rng.choice(["GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "TRACE", "POST", "PRI"])
    target = rng.choice(["*", "/", "//", "/%ff", "http://[::1", "/v1/models/%00", "x:1", "/v1/completions", "/a?" + "&" * 100])
    upgrade = rng.choice(["", "Connection: Upgrade\r\nUpgrade: websocket\r\n", "Connection: Upgrade\r\nUpgrade: h2c\r\n"])
    return f"{method} {target} HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n".encode()


def test_nonsense_gets_a_typed_answer_in_time_and_no_traceback(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    print("FUZZ_SEED", SEED)
    rng = random.Random(SEED)
    found: set[int] = set()
    for _ in range(10):
        sent = [nonsense(rng) for _ in range(40)]
        connections = [service.connect(data) for data in sent]
        for data, connection in zip(sent, connections, strict=True):
            connection.settimeout(10)
            connection.shutdown(socket.SHUT_WR) if rng.random() < 0.1 else None
            try:
                found.update(statuses(connection.recv(2**16)))
            except ConnectionResetError:
                pass
            except TimeoutError:
                raise AssertionError(f"no answer within 10 s to {data[:300]!r}") from None
            connection.close()
    assert found <= ALLOWED, found
    assert {200, 400, 404, 405, 408} <= found
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert service.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code == 200
    assert service.metric(IN_FLIGHT) == 0
