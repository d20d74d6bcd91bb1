"""`twostroke prefill`: an engine that computes prompts and ships their blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from services.prefill.server import PrefillService
from shared.base.worker_info import Role
from shared.options.config import parse_config
from shared.options.worker import WorkerConfig
from shared.rpc import control_pb2_grpc
from shared.transfer.handoff.setup import make_links
from shared.worker.worker import Front, Service, Worker, run_worker


def main(argv: Sequence[str]) -> None:
    config = parse_config(WorkerConfig, argv, "twostroke prefill", os.environ)
    run_worker(config, Role.PREFILL, prefill_front)


def prefill_front(worker: Worker) -> Front:
    links = make_links(worker.config, worker.pool, worker.host_name)
    service = PrefillService(worker, worker.engine, worker.streams, worker.channels, links)
    prefill = Service(control_pb2_grpc.add_PrefillServicer_to_server, service, "twostroke.v1.Prefill")
    return Front([prefill], links.transports, links.close)
