"""What the two legs of a request tell Prometheus."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from shared.process.telemetry import LATENCY_BUCKETS_S
from shared.rpc import control_pb2

failovers = Counter("twostroke_failovers_total", "Legs that failed and were served otherwise, by leg and cause", ["leg", "cause"])
prefill_seconds = Histogram("twostroke_prefill_seconds", "Stages of a remote prefill", ["stage"], buckets=LATENCY_BUCKETS_S)


def observe_prefill(reply: control_pb2.PrefillReply) -> None:
    prefill_seconds.labels("queue").observe(reply.queue_s)
    prefill_seconds.labels("compute").observe(reply.compute_s)
    prefill_seconds.labels("transfer").observe(reply.transfer_s)
