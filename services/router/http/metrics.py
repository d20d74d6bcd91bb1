"""What the front end counts, in Prometheus' conventions. Latencies are those a client sees, less the network."""

from __future__ import annotations

import time

from prometheus_client import Counter, Gauge, Histogram

from shared.process.telemetry import LATENCY_BUCKETS_S

HTTP_REQUESTS = Counter("twostroke_http_requests_total", "HTTP requests by path and status", ["endpoint", "status"])
HTTP_REQUEST_SECONDS = Histogram(
    "twostroke_http_request_seconds", "From a request's arrival to its last byte", ["endpoint"], buckets=LATENCY_BUCKETS_S
)
REQUESTS_IN_FLIGHT = Gauge("twostroke_http_requests_in_flight", "Generation requests being answered")
REQUESTS_REFUSED = Counter("twostroke_http_requests_refused_total", "Generation requests beyond the limit of concurrent ones")
CLIENT_DISCONNECTS = Counter("twostroke_http_client_disconnects_total", "Clients that went away before their answer was complete")
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "twostroke_time_to_first_token_seconds", "From a request's arrival to its first output token", buckets=LATENCY_BUCKETS_S
)
INTER_TOKEN_LATENCY_SECONDS = Histogram(
    "twostroke_inter_token_latency_seconds", "Between consecutive output tokens of one choice", buckets=LATENCY_BUCKETS_S
)
PROMPT_TOKENS = Counter("twostroke_prompt_tokens_total", "Prompt tokens of requests that were started")
CACHED_PROMPT_TOKENS = Counter("twostroke_cached_prompt_tokens_total", "Prompt tokens found in a prefix cache")
COMPLETION_TOKENS = Counter("twostroke_completion_tokens_total", "Output tokens")


class TokenClock:
    """Takes the times of one HTTP request's output tokens."""

    def __init__(self, arrived_s: float) -> None:
        """`arrived_s`: time.perf_counter() at the request's arrival."""
        self._arrived_s = arrived_s
        self._last_s: dict[int, float] = {}

    def tick(self, choice: int, num_tokens: int) -> None:
        """`num_tokens` of a choice came now. Several at once share the time since the last ones."""
        now_s = time.perf_counter()
        last_s = self._last_s.get(choice)
        if last_s is not None:
            for _ in range(num_tokens):
                INTER_TOKEN_LATENCY_SECONDS.observe((now_s - last_s) / num_tokens)
        elif not self._last_s:
            TIME_TO_FIRST_TOKEN_SECONDS.observe(now_s - self._arrived_s)
        self._last_s[choice] = now_s
