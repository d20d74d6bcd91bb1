"""What is measured of the registry and the prefix index, on both of their sides."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

LOOKUP_SECONDS = Histogram(
    "twostroke_index_lookup_seconds",
    "Time of a prefix lookup, failed ones included",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
)
EVENTS = Counter("twostroke_index_events_total", "Block events sent to the index", ["kind"])  # stored, removed
SNAPSHOTS = Counter("twostroke_index_snapshots_total", "Times a worker's whole set was sent, at start or after a gap")
ERRORS = Counter("twostroke_index_errors_total", "Failed Redis operations", ["operation"])  # lookup, publish, write, watch
REFUSED = Counter("twostroke_index_refused_total", "Invalid entries and messages in Redis, which were ignored", ["source"])
WRITES_REFUSED = Gauge("twostroke_index_writes_refused", "1 while Redis answers this worker and refuses its writes")
IS_FOLLOWING = Gauge("twostroke_index_following", "1 while this router hears the registry, 0 while it uses what it last knew")
NUM_STALE = Gauge("twostroke_index_stale_workers", "Workers whose heartbeats are overdue, as this router sees them")
