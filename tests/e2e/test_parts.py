"""The parts as separate commands that find each other through a Redis, as on several machines: in plain text, and with mTLS."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.local.valkey import ValkeyAddress
from shared.options.peers import PeerConfig
from shared.rpc import control_pb2, control_pb2_grpc
from shared.wire.channels import Channels
from shared.wire.settings import read_file
from tests.support.eventually import eventually
from tests.support.parts import Part, free_ports, service_command, started
from tests.support.tiny_model import save_tiny_model
from tests.support.valkey import TestValkey

PROMPT = {"prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "model": "my-model"}
WORKER_FLAGS = ("--host", "0.0.0.0", "--kernels", "reference", "--device", "cpu", "--num-threads", "1", "--num-blocks", "64")


class Recipe:
    """What an operator exports and types, on one machine instead of several."""

    def __init__(self, folder: Path, valkey: TestValkey) -> None:
        self._folder = folder
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTROKE_")} | {
            "TWOSTROKE_REDIS_URL": valkey.url,
            "TWOSTROKE_MODEL": str(save_tiny_model(folder / "my-model")),
            "OMP_NUM_THREADS": "1",
        }

    def worker(self, role: str, name: str, *flags: str) -> Part:
        (port,) = free_ports(1)
        own = ("--port", str(port), "--advertise", f"localhost:{port}", "--worker-id", name)
        return self._part(role, name, *WORKER_FLAGS, *own, *flags)

    def nameless_worker(self, role: str, *flags: str) -> Part:
        """Takes a free port, and is told neither its name nor its address."""
        return self._part(role, f"{role}{flags[-1]}", *WORKER_FLAGS, *flags)

    def router(self, *flags: str) -> tuple[Part, str]:
        (port,) = free_ports(1)
        return self._part("router", "router", "--port", str(port), *flags), f"http://127.0.0.1:{port}"

    def _part(self, role: str, name: str, *flags: str) -> Part:
        return Part(name, (*service_command(role), *flags), self._environ, self._folder / f"{name}.log")


@pytest.fixture
async def recipe(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Recipe]:
    valkey = TestValkey(ValkeyAddress(port=unused_tcp_port))
    await valkey.start()
    yield Recipe(tmp_path, valkey)
    await valkey.stop()


async def complete(url: str, **more: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{url}/v1/completions", json={**PROMPT, **more})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def handoffs(url: str) -> float:
    """Prompts that a prefill worker has computed and handed over."""
    async with httpx.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith('twostroke_prefill_seconds_count{stage="transfer"')
    )


async def test_separate_commands_find_each_other_and_serve_and_salts_keep_tenants_apart(recipe: Recipe) -> None:
    router, url = recipe.router("--handoff", "always")
    async with started(recipe.worker("prefill", "prefill-1"), recipe.worker("decode", "decode-1"), router):
        before = await handoffs(url)
        whole = await complete(url)
        assert whole["usage"]["completion_tokens"] > 0
        assert await handoffs(url) == before + 1

        async def num_cached(salt: str) -> int:
            reply = await complete(url, prompt=list(range(10, 80)), cache_salt=salt)
            return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await num_cached("tenant a") == 0
        assert await num_cached("tenant a") == 64
        assert await num_cached("tenant b") == 0
        assert await num_cached("") == 0


class Ca:
    """A certificate authority made for this test."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", f"/CN={folder.name}")

    def flags(self, name: str, trusted: Ca | None = None) -> tuple[str, ...]:
        """Of a process with a new certificate. `trusted` is the authority whose certificates it accepts; default: this one."""
        tls = self.tls(name, trusted)
        return ("--tls-cert", tls.tls_cert, "--tls-key", tls.tls_key, "--tls-ca", tls.tls_ca)

    def tls(self, name: str, trusted: Ca | None = None) -> PeerConfig:
        self._openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self._folder / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        ca = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        signed = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext")
        self._openssl("x509", "-req", *ca, *signed)
        authority = (trusted or self)._folder / "ca.pem"
        own = self._folder / name
        return PeerConfig(tls_cert=f"{own}.pem", tls_key=f"{own}.key", tls_ca=str(authority))

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=self._folder, check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


async def status_of(address: str, caller: PeerConfig) -> str:
    """What a worker at `address` answers to this caller."""
    channels = Channels(caller)
    try:
        return await status_by(channels.get(address))
    finally:
        await channels.close()


async def status_by(channel: Any) -> str:
    try:
        await control_pb2_grpc.WorkerStub(channel).GetStatus(control_pb2.GetStatusRequest(), timeout=10)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


async def test_parts_with_one_secret_serve_each_other_and_who_has_another_serves_nobody(recipe: Recipe, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path in (ours, theirs):
        path.touch(0o600)
        path.write_text(secrets.token_urlsafe())
    flag = "--cluster-secret-file"
    router, url = recipe.router("--handoff", "always", flag, str(ours))
    prefill = recipe.worker("prefill", "prefill-1", flag, str(ours))
    decode = recipe.worker("decode", "decode-1", flag, str(ours))
    stranger = recipe.worker("decode", "stranger", flag, str(theirs))
    async with started(prefill, decode, router):
        whole = await complete(url)
        assert await handoffs(url) >= 1
        address = decode.flag("--advertise")
        assert await status_of(address, PeerConfig()) == "UNAUTHENTICATED"
        assert await status_of(address, PeerConfig(cluster_secret_file=str(theirs))) == "UNAUTHENTICATED"
        assert await status_of(address, PeerConfig(cluster_secret_file=str(ours))) == "OK"
        async with started(stranger):
            texts = [(await complete(url))["choices"][0]["text"] for _ in range(12)]
            assert texts == [whole["choices"][0]["text"]] * 12
            await eventually(lambda: "does not bear this cluster's secret" in stranger.log_path.read_text(), timeout_s=30)
        assert not [part.name for part in (router, prefill, decode, stranger) if ours.read_text() in part.log_path.read_text()]


async def test_workers_on_all_addresses_register_ones_that_are_reached_and_ids_of_their_own(recipe: Recipe) -> None:
    router, url = recipe.router("--handoff", "always", "--host", "::")
    prefill = recipe.nameless_worker("prefill", "--host", "0.0.0.0")
    decode = recipe.nameless_worker("decode", "--host", "::")
    other = recipe.nameless_worker("decode", "--host", "::1")
    async with started(prefill, decode, other, router):
        await complete(url)
        assert await handoffs(url) >= 1
        await decode.stop()
        await complete(url, prompt="over IPv6 only")
        assert await handoffs(url) >= 2


async def test_mtls_serves_and_workers_of_another_authority_are_refused_while_the_rest_goes_on(
    recipe: Recipe, tmp_path: Path
) -> None:
    ours, theirs = Ca(tmp_path / "ours"), Ca(tmp_path / "theirs")
    router, url = recipe.router("--handoff", "always", *ours.flags("router"))
    prefill = recipe.worker("prefill", "prefill-1", *ours.flags("prefill"))
    decode = recipe.worker("decode", "decode-1", *ours.flags("decode"))
    # Accepts our callers, but shows a certificate that we do not know.
    stranger = recipe.worker("decode", "stranger", *theirs.flags("stranger", trusted=ours))
    # Knows our certificates, but calls with one that we do not know.
    intruder = recipe.worker("prefill", "intruder", *theirs.flags("intruder", trusted=ours))
    async with started(prefill, decode, router):
        whole = await complete(url)
        assert await handoffs(url) >= 1
        address = decode.flag("--advertise")
        assert await status_of(address, ours.tls("caller")) == "OK"
        assert await status_of(address, theirs.tls("caller", trusted=ours)) == "UNAVAILABLE"
        trust_only = grpc.ssl_channel_credentials(read_file(ours.tls("nobody").tls_ca))
        async with grpc.aio.secure_channel(address, trust_only) as channel:
            assert await status_by(channel) == "UNAVAILABLE"
        assert await status_of(address, PeerConfig()) == "UNAVAILABLE"
        async with started(stranger, intruder):
            texts = [(await complete(url))["choices"][0]["text"] for _ in range(12)]
            assert texts == [whole["choices"][0]["text"]] * 12

            async def is_refused() -> bool:
                """Nothing was ever served by them, and the router said why."""
                await complete(url)
                log = router.log_path.read_text()
                return "stranger fails and rests: failed to connect" in log and "intruder fails and rests: failed to connect" in log

            await eventually(is_refused, timeout_s=30)
        await prefill.stop()
        await prefill.start()
        assert (await complete(url))["choices"][0]["text"] == whole["choices"][0]["text"]
