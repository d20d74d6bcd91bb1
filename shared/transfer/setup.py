"""Which transports a worker takes part in, best first: what its memory and its options allow.

    shm    a pool of the receiver in shared memory, and a sender on the same host
    nccl   both pools on GPUs
    gloo   both pools on CPUs
    grpc   always

NCCL and gloo send in the clear, so with TLS they are used only where `--transport` asks for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shared.engine.kv_pool import KvPool
from shared.errors import ConfigError
from shared.transfer.group_host import GroupHost
from shared.transfer.group_link import GroupConnector
from shared.transfer.hosts import Hosts
from shared.transfer.inline import InlineConnector, InlineHost
from shared.transfer.interface import GLOO, GRPC, NCCL, SHM, Connector, Host
from shared.transfer.links import Links
from shared.transfer.shm_host import ShmHost
from shared.transfer.shm_link import ShmConnector
from shared.worker_config import WorkerConfig


def make_links(config: WorkerConfig, pool: KvPool, host_name: Callable[[], str]) -> Links:
    """A prefill worker's. `host_name` gives the name that others reach this host by, once it is known. Raises ConfigError."""
    makers: dict[str, Callable[[], Connector]] = {
        SHM: lambda: ShmConnector(pool.geometry),
        NCCL: lambda: GroupConnector(NCCL, pool.device, host_name, config.transfer_timeout_s),
        GLOO: lambda: GroupConnector(GLOO, pool.device, host_name, config.transfer_timeout_s),
        GRPC: InlineConnector,
    }
    return Links([makers[name]() for name in _choose(config, [SHM, *_possible(pool), GRPC])])


def make_hosts(config: WorkerConfig, pool: KvPool, boot_id: str, host_name: Callable[[], str]) -> Hosts:
    """A decode worker's; as `make_links`."""
    makers: dict[str, Callable[[], Host]] = {
        SHM: lambda: ShmHost(pool, boot_id),
        NCCL: lambda: GroupHost(NCCL, pool, boot_id, host_name, config.transfer_timeout_s),
        GLOO: lambda: GroupHost(GLOO, pool, boot_id, host_name, config.transfer_timeout_s),
        GRPC: InlineHost,
    }
    shared = [SHM] if pool.shared_storage is not None else []
    return Hosts([makers[name]() for name in _choose(config, [*shared, *_possible(pool), GRPC])])


def _possible(pool: KvPool) -> list[str]:
    if pool.device.type == "cuda":
        return [NCCL] if dist.is_available() and dist.is_nccl_available() else []
    return [GLOO] if dist.is_available() and dist.is_gloo_available() else []


def _choose(config: WorkerConfig, possible: list[str]) -> list[str]:
    if config.transport == "auto":
        return [name for name in possible if name not in (NCCL, GLOO) or not config.tls_cert]
    if config.transport not in possible:
        raise ConfigError(f"--transport is {config.transport}, but this worker can only do {', '.join(possible)}")
    return [config.transport]
