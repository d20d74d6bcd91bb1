"""`twostroke decode`: an engine that takes over computed prompts and generates; `--colocated` computes prompts itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from services.decode.config import DecodeConfig
from services.decode.server import DecodeService
from shared.base.worker_info import Role
from shared.options.config import parse_config
from shared.rpc import control_pb2_grpc, kv_pb2_grpc
from shared.transfer.handoff.receiver import Receiver
from shared.transfer.handoff.service import KvTransferService
from shared.transfer.handoff.setup import make_acceptors
from shared.transfer.transports.heads import PoolGroup
from shared.worker.worker import Front, Service, Worker, run_worker


def main(argv: Sequence[str]) -> None:
    config = parse_config(DecodeConfig, argv, "twostroke decode", os.environ)
    run_worker(config, Role.COLOCATED if config.colocated else Role.DECODE, decode_front)


def decode_front(worker: Worker) -> Front:
    if worker.role is Role.COLOCATED:
        return Front([_decode(worker, None)])
    timeout_s = worker.config.transfer_timeout_s
    pools = PoolGroup.of(worker.pool)
    acceptors = make_acceptors(worker.config, pools, worker.boot_id, worker.host_name)
    receiver = Receiver(worker.engine, pools, worker.vocab_size, worker.boot_id, timeout_s, worker.streams.deliver, acceptors)
    service = KvTransferService(receiver, timeout_s)
    transfer = Service(kv_pb2_grpc.add_KvTransferServicer_to_server, service, "twostroke.v1.KvTransfer")
    return Front([_decode(worker, receiver), transfer], acceptors.transports, acceptors.close)


def _decode(worker: Worker, receiver: Receiver | None) -> Service:
    service = DecodeService(worker, worker.engine, worker.streams, receiver)
    return Service(control_pb2_grpc.add_DecodeServicer_to_server, service, "twostroke.v1.Decode")
