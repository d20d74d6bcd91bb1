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
from shared.worker.worker import Service, Worker, run_worker


def main(argv: Sequence[str]) -> None:
    config = parse_config(DecodeConfig, argv, "twostroke decode", os.environ)
    run_worker(config, Role.COLOCATED if config.colocated else Role.DECODE, decode_services)


def decode_services(worker: Worker) -> list[Service]:
    if worker.role is Role.COLOCATED:
        return [_decode(worker, None)]
    timeout_s = worker.config.transfer_timeout_s
    pools = PoolGroup.of(worker.pool)
    acceptors = make_acceptors(worker.config, pools, worker.boot_id, worker.host_name)
    worker.transports = acceptors.transports
    worker.at_close(acceptors.close)
    receiver = Receiver(worker.engine, pools, worker.vocab_size, worker.boot_id, timeout_s, worker.streams.deliver, acceptors)
    transfer = KvTransferService(receiver, timeout_s)
    return [
        _decode(worker, receiver),
        Service(kv_pb2_grpc.add_KvTransferServicer_to_server, transfer, "twostroke.v1.KvTransfer"),
    ]


def _decode(worker: Worker, receiver: Receiver | None) -> Service:
    service = DecodeService(worker, worker.engine, worker.streams, receiver)
    return Service(control_pb2_grpc.add_DecodeServicer_to_server, service, "twostroke.v1.Decode")
