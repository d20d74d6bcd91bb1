"""Which transports a worker takes part in, best first: what its memory and its options allow.

    cuda-ipc   pools of both on GPUs of one machine that both processes see
    shm        pools of the receiver in shared memory, and a sender on the same machine
    nccl       pools of both on GPUs
    gloo       pools of both on CPUs
    grpc       always

NCCL and gloo send in the clear, so with TLS they are used only where `--transport` asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shared.base.errors import ConfigError
from shared.engine.memory.kv_pool import KvPool
from shared.options.worker import WorkerConfig
from shared.transfer.handoff.acceptors import Acceptors
from shared.transfer.handoff.links import Links
from shared.transfer.transports.group.link import GroupConnector
from shared.transfer.transports.group.receiver import GroupAcceptor
from shared.transfer.transports.grpc import GrpcAcceptor, GrpcConnector
from shared.transfer.transports.heads import PoolGroup
from shared.transfer.transports.interface import CUDA_IPC, GLOO, GRPC, NCCL, SHM, Acceptor, Connector
from shared.transfer.transports.mapped.cuda_device import CudaDevice
from shared.transfer.transports.mapped.cuda_ipc import CudaExported, CudaMapper
from shared.transfer.transports.mapped.link import MappedConnector
from shared.transfer.transports.mapped.memory import Exported
from shared.transfer.transports.mapped.receiver import MappedAcceptor
from shared.transfer.transports.mapped.shm import ShmExported, ShmMapper

log = logging.getLogger(__name__)


def make_links(config: WorkerConfig, pool: KvPool, address: Callable[[], str]) -> Links:
    """A prefill worker's. `address` gives the name that others reach this machine by, once it is known. Raises ConfigError."""
    device = pool.device
    makers: dict[str, Callable[[], Connector]] = {
        CUDA_IPC: lambda: MappedConnector(CudaMapper(CudaDevice()), pool.geometry),
        SHM: lambda: MappedConnector(ShmMapper(), pool.geometry),
        NCCL: lambda: GroupConnector(NCCL, device, address, config.transfer_timeout_s),
        GLOO: lambda: GroupConnector(GLOO, device, address, config.transfer_timeout_s),
        GRPC: GrpcConnector,
    }
    mapped = [CUDA_IPC, SHM] if _has_cuda_ipc(device) else [SHM]
    return Links([makers[name]() for name in _choose(config, [*mapped, *_group_backends(device), GRPC])])


def make_acceptors(config: WorkerConfig, pools: PoolGroup, boot_id: str, address: Callable[[], str]) -> Acceptors:
    """A decode worker's; as `make_links`."""
    exported = _export(pools) if config.transport in ("auto", CUDA_IPC, SHM) else None
    makers: dict[str, Callable[[], Acceptor]] = {
        NCCL: lambda: GroupAcceptor(NCCL, pools, boot_id, config.host, address, config.transfer_timeout_s),
        GLOO: lambda: GroupAcceptor(GLOO, pools, boot_id, config.host, address, config.transfer_timeout_s),
        GRPC: GrpcAcceptor,
    }
    possible = [*_group_backends(pools.shards[0].pool.device), GRPC]
    if exported is not None:
        makers[exported.name] = lambda: MappedAcceptor(exported, boot_id)
        possible.insert(0, exported.name)
    return Acceptors([makers[name]() for name in _choose(config, possible)])


def _export(pools: PoolGroup) -> Exported | None:
    """The pools as other processes of this machine may map them, if all of them are of such a kind."""
    if all(shard.pool.shared_storage is not None for shard in pools.shards):
        return ShmExported(pools)
    if all(_has_cuda_ipc(shard.pool.device) for shard in pools.shards):
        try:
            return CudaExported(pools, CudaDevice())
        except OSError as error:  # as with memory that was not made by cudaMalloc
            log.warning("other processes of this machine cannot map the KV pool: %s", error)
    return None


def _has_cuda_ipc(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None  # torch says "cuda" to AMD's GPUs too


def _group_backends(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return [NCCL] if dist.is_available() and dist.is_nccl_available() else []
    return [GLOO] if dist.is_available() and dist.is_gloo_available() else []


def _choose(config: WorkerConfig, possible: Sequence[str]) -> list[str]:
    if config.transport == "auto":
        return [name for name in possible if name not in (NCCL, GLOO) or not config.tls_cert]
    if config.transport not in possible:
        raise ConfigError(f"--transport is {config.transport}, but this worker can only do {', '.join(possible)}")
    return [config.transport]
