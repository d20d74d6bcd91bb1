"""What the handoff tells Prometheus, on both sides."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shared.process.telemetry import LATENCY_BUCKETS_S

transferred_bytes = Counter("twostroke_transfer_bytes_total", "KV bytes moved between workers", ["direction", "transport"])
transfer_seconds = Histogram(
    "twostroke_transfer_seconds",
    "From the end of the prompt's computation to the acknowledged commit",
    ["transport"],
    buckets=LATENCY_BUCKETS_S,
)
transfers = Counter("twostroke_transfers_total", "Transfers by how they ended, at the receiver", ["result"])
refused = Counter("twostroke_transfer_refusals_total", "Messages of transfers that the receiver refused", ["cause"])
quarantined_blocks = Gauge(
    "twostroke_transfer_quarantined_blocks", "Blocks of ended transfers to which the sender could still write"
)
links = Counter("twostroke_transfer_links_total", "Links to receivers, made or failed", ["transport", "result"])
