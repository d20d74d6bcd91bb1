"""Logs and metrics: one set-up for all processes. Metric names and units follow Prometheus' conventions."""

from __future__ import annotations

import logging
import sys

from prometheus_client import start_http_server

from shared.base.address import Address
from shared.base.errors import ConfigError

# Seconds, from one token's time on a fast GPU to a long prompt on a slow CPU.
LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


def configure_logging(level: str, component: str) -> None:
    """One line per record on stderr: time, level, component, message."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)-7s {component} %(message)s",
        force=True,
    )
    for noisy in ("httpx", "urllib3", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def serve_metrics(host: str, port: int) -> None:
    """Serves the process's metrics on http://host:port/metrics. Raises ConfigError if the port cannot be had."""
    try:
        start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {Address(host, port)}: {error.strerror}") from None
