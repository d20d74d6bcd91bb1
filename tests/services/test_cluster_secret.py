"""Worker ports are for the cluster: every method of every service refuses who does not bear the secret, and touches nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.base.errors import ConfigError, TwostrokeError, Unavailable
from shared.base.worker_info import Role
from shared.options.peers import PeerConfig
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2, kv_pb2, kv_pb2_grpc
from shared.wire import cluster_secret
from shared.wire.cluster_secret import read_cluster_secret
from shared.wire.serving import Server
from tests.support.cluster import Cluster, cluster, prompt_of, request
from tests.support.eventually import eventually
from tests.support.fake_runner import expected_tokens

SECRET = "open sesame, and be quick"
KEY = "twostroke-cluster-secret"
STRANGERS = {
    "no secret": (),
    "a wrong one": ((KEY, "open barley, and be quick"),),
    "its beginning": ((KEY, SECRET[:-1]),),
    "more than it": ((KEY, SECRET + "!"),),
    "an empty one": ((KEY, ""),),
    "two": ((KEY, "open barley, and be quick"), (KEY, SECRET)),
}
METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
    for file in (control_pb2.DESCRIPTOR, kv_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]


@pytest.fixture
async def guarded() -> AsyncIterator[Cluster]:
    async with cluster(SECRET) as made:
        await made.add(Role.PREFILL)
        await made.add(Role.DECODE)
        yield made


async def call(channel: grpc.aio.Channel, method: str, streams_in: bool, streams_out: bool, metadata: Sequence[Any]) -> str:
    """The status of a call whose messages are random bytes."""
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    begin = getattr(channel, kind)(method)

    async def messages() -> AsyncIterator[bytes]:
        yield b"\xff\x01nonsense"

    made = begin(messages() if streams_in else b"\xff\x01nonsense", metadata=metadata, timeout=10)
    return str((await made.code()).name)


def test_all_services_are_tried() -> None:
    services = {method.split("/")[1] for method, _, _ in METHODS}
    assert services == {"twostroke.v1.Worker", "twostroke.v1.Prefill", "twostroke.v1.Decode", "twostroke.v1.KvTransfer"}


@pytest.mark.parametrize("metadata", STRANGERS.values(), ids=STRANGERS)
async def test_strangers_are_refused_by_every_method_while_a_stream_goes_on_undisturbed(guarded: Cluster, metadata: Any) -> None:
    decode = guarded.workers[1]
    decode.runner.gate.clear()
    asked = request(prompt_of(30), max_tokens=20)
    running = asyncio.create_task(guarded.run(asked))
    await eventually(lambda: decode.worker.engine.load().num_running + decode.worker.engine.num_reserved_and_held()[0] > 0)
    before = cluster_secret.refused_calls._value.get()
    for worker in guarded.workers:
        async with grpc.aio.insecure_channel(worker.info().address) as channel:
            codes = [await call(channel, *method, metadata) for method in METHODS]
            codes.append(await call(channel, "/twostroke.v1.Worker/NoSuchMethod", False, False, metadata))
        assert set(codes) == {"UNAUTHENTICATED"}
    assert cluster_secret.refused_calls._value.get() == before + 2 * (len(METHODS) + 1)
    decode.runner.gate.set()
    assert (await running)[0] == expected_tokens(asked.token_ids, 20)
    await eventually(lambda: all(worker.is_idle() for worker in guarded.workers))
    for worker in guarded.workers:
        worker.check_baseline()


async def test_who_bears_the_secret_is_answered_and_health_checks_need_none(guarded: Cluster) -> None:
    address = guarded.workers[1].info().address
    stub = kv_pb2_grpc.KvTransferStub(guarded.channels.get(address))
    assert (await stub.GetOffers(kv_pb2.OffersRequest(), timeout=10)).offers
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_router_with_another_secret_says_unavailable_to_its_client_not_unauthorized() -> None:
    config = WorkerConfig(cluster_secret=SECRET, max_num_batched_tokens=64)
    async with cluster("another secret than theirs") as made:
        made.dispatcher._worker_wait_s = 0.1
        await made.add(Role.DECODE, config=config)
        running = asyncio.create_task(made.run(request(prompt_of(8))))
        async with asyncio.timeout(10):
            await asyncio.wait({running})
        error = running.exception()
        assert isinstance(error, TwostrokeError)
        assert error.http_status == Unavailable.http_status
        assert SECRET not in str(error)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    return path


def test_the_secret_comes_from_its_file_without_the_spaces_around_it(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(f"\n  {SECRET}\n")
    assert read_cluster_secret(PeerConfig(cluster_secret_file=str(file))) == SECRET
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o644, 0o602])
def test_a_secret_that_everybody_may_read_or_write_is_warned_of_by_its_files_name(
    file: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    file.write_text(SECRET)
    file.chmod(mode)
    assert read_cluster_secret(PeerConfig(cluster_secret_file=str(file))) == SECRET
    assert str(file) in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 characters; it must have at least 16"),
        (b"x" * 15 + b"\n", "has 15 characters; it must have at least 16"),
        ("h\u00f6chst geheim und lang".encode(), "printable ASCII"),
        (b"two lines of\nsomething", "printable ASCII"),
        (b"\xff\xfe" * 20, "not a text file"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_without_showing_it(file: Path, content: bytes, words: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_cluster_secret(PeerConfig(cluster_secret_file=str(file)))
    assert str(file) in str(refused.value)
    assert "geheim" not in str(refused.value)
    assert "something" not in str(refused.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read /no/such/file: No such file or directory"):
        read_cluster_secret(PeerConfig(cluster_secret_file="/no/such/file"))


@pytest.mark.parametrize(
    ("config", "host", "is_warned_of"),
    [
        (PeerConfig(), "0.0.0.0", True),
        (PeerConfig(), "127.0.0.1", False),
        (PeerConfig(cluster_secret=SECRET), "0.0.0.0", False),
    ],
)
async def test_an_open_worker_is_warned_of_once_it_listens_to_other_machines(
    config: PeerConfig, host: str, is_warned_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(config)
    server.bind(host, 0)
    await server.start()
    await server.stop(0)
    assert ("--cluster-secret-file" in caplog.text) == is_warned_of
