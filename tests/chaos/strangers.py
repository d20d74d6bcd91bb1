"""What hostile or careless neighbours and clients do, and what a worker or Redis does that lives but does not work.

Nonsense in Redis and over gRPC, streams that nobody reads; a blocked event loop, a Redis that refuses writes, a full disk.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from contextlib import suppress
from urllib.parse import urlsplit

import grpc
import grpc.aio

from shared.index.connection import connect
from tests.chaos.faults import Fault
from tests.chaos.load import Load, make_asks
from tests.chaos.site import CLUSTER_SECRET, Site, SiteWorker
from tests.support.nonsense import METHODS, nonsense_bytes

_SMALL_BUFFER_BYTES = 4096
_CALL_TIMEOUT_S = 0.5
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time


def _random_json(rng: random.Random, depth: int = 0) -> object:
    if depth < 3 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [_random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
        names = ["worker_id", "boot_id", "address", "role", "load", "max_num_seqs", "num_blocks", "digest", "model", "x"]
        return {rng.choice(names): _random_json(rng, depth + 1) for _ in range(rng.randrange(6))}
    return rng.choice([None, True, 0, -1, 10**400, 1e308, -0.5, "", "decode-0", "\0", "é" * 300, 2**63])


def _garbage(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.choice([0, 1, 30, 3000]))
    return json.dumps(_random_json(rng)).encode()


class PoisonRedis(Fault):
    """Somebody else writes to our channels and keys: JSON of every type, huge numbers, bytes that are no text."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with site.valkey_lock:
            client = connect(site.valkey.url)
            channels = await client.pubsub_channels()
            for _ in range(rng.randrange(5, 60)):
                await client.publish(rng.choice(channels), _garbage(rng)) if channels else None
            keys = [key async for key in client.scan_iter("twostroke:*")]
            poisoned = rng.sample(keys, min(len(keys), rng.randrange(1, 4)))
            for key in poisoned:
                await self._overwrite(client, key, rng)
            await client.aclose()
        return f"{len(channels)} channels, {len(poisoned)} keys"

    async def _overwrite(self, client: object, key: bytes, rng: random.Random) -> None:
        """A value of the type that was there, or of another; it lives a little, as what was there would have."""
        garbage = _garbage(rng)
        async with client.pipeline() as pipe:  # type: ignore[attr-defined]
            if rng.random() < 0.3:
                pipe.delete(key)
                pipe.hset(key, mapping={garbage[:50] or b"x": garbage})
            elif (kind := await client.type(key)) in (b"set", "set"):  # type: ignore[attr-defined]
                pipe.sadd(key, garbage)
            elif kind in (b"string", "string"):
                pipe.set(key, garbage)
            else:
                pipe.delete(key)
                pipe.set(key, garbage)
            pipe.expire(key, 5)
            await pipe.execute()


class CallWithNonsense(Fault):
    """Every method of a worker, without the cluster's secret, with a wrong one, and with the right one and nonsense inside."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        worker = rng.choice(site.workers)
        count = rng.randrange(20, 60)
        async with grpc.aio.insecure_channel("{}:{}".format(*worker.target)) as channel:
            calls = [self._call(channel, rng.choice(METHODS), rng) for _ in range(count)]
            await asyncio.gather(*calls)
        return f"{count} calls at {worker.name}"

    async def _call(self, channel: grpc.aio.Channel, method: str, rng: random.Random) -> None:
        secret = rng.choice([None, "wrong " * 8, CLUSTER_SECRET])
        metadata = () if secret is None else (("twostroke-cluster-secret", secret),)
        data = nonsense_bytes(rng, method)
        call = channel.unary_stream(method)(data, timeout=_CALL_TIMEOUT_S, metadata=metadata)
        with suppress(grpc.RpcError):
            async for _ in call:
                pass


class ReadNothing(Fault):
    """Clients that ask for long streams over small buffers and do not read, as a phone that was put away."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        count, duration_s = rng.randrange(8, 48), rng.uniform(0.5, 4.0)
        url = urlsplit(site.url)
        sockets = [self._ask(url.hostname or "", url.port or 0, rng) for _ in range(count)]
        await asyncio.sleep(duration_s)
        for one in sockets:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            one.close()
        return f"{count} clients for {duration_s:.1f} s"

    def _ask(self, host: str, port: int, rng: random.Random) -> socket.socket:
        [ask] = make_asks(rng, 1)
        body = json.dumps({**ask.body, "max_tokens": 40, "stream": True}).encode()
        head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
        one.settimeout(0.2)
        with suppress(OSError):  # the router may be away
            one.connect((host, port))
            one.sendall(head.encode() + body)
        return one


class BlockLoop(Fault):
    """A worker's event loop stands still in a long call, while gRPC's own threads go on answering pings."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        free = [worker for worker in site.workers if not worker.lock.locked()]
        worker: SiteWorker = rng.choice(free or site.workers)
        async with worker.lock:
            duration_s = rng.choice([0.2, 1.0, 4.0]) * rng.uniform(0.5, 1.5)
            site.block_loop(worker, duration_s)
            await asyncio.sleep(duration_s)
        return f"{worker.name} for {duration_s:.1f} s"


class RefuseWrites(Fault):
    """Redis answers and refuses every write: its memory is full, or it is a replica now."""

    weight = 2

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        async with site.valkey_lock:
            client = connect(site.valkey.url)
            is_full, duration_s = rng.random() < 0.5, rng.choice([1.0, 7.0]) * rng.uniform(0.5, 1.5)
            if is_full:
                await client.config_set("maxmemory", 1)
            else:
                await client.execute_command("REPLICAOF", "127.0.0.1", "1")
            await asyncio.sleep(duration_s)
            await client.config_set("maxmemory", 0)
            await client.execute_command("REPLICAOF", "NO", "ONE")
            await client.aclose()
        return f"{'full' if is_full else 'a replica'} for {duration_s:.1f} s"


class FillDisk(Fault):
    """No byte more fits where workers write their logs."""

    async def strike(self, site: Site, load: Load, rng: random.Random) -> str:
        duration_s = rng.uniform(0.5, 4.0)
        assert site.disk is not None
        site.disk.fill()
        await asyncio.sleep(duration_s)
        site.disk.free()
        return f"for {duration_s:.1f} s"


EVERYWHERE: tuple[type[Fault], ...] = (PoisonRedis, CallWithNonsense, ReadNothing, BlockLoop, RefuseWrites)
