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
REQUESTS_REFUSED = Counter("twostroke_http_requests_refused_total", "Requests and connections refused, by reason", ["reason"])
MODELS_REFUSED = Counter("twostroke_models_refused_total", "Models with workers that are not served, by reason", ["reason"])
CLIENTS_STUCK = Counter(
    "twostroke_http_clients_stuck_total", "Connections aborted because the client did not read its answer in time"
)
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

    def __init__(self, arrived_at: float) -> None:
        """`arrived_at`: time.perf_counter() at the request's arrival."""
        self._arrived_at = arrived_at
        self._last_at: dict[int, float] = {}

    def tick(self, choice: int, num_tokens: int) -> None:
        """`num_tokens` of a choice came now. Several at once share the time since the last ones."""
        now_at = time.perf_counter()
        last_at = self._last_at.get(choice)
        if last_at is not None:
            for _ in range(num_tokens):
                INTER_TOKEN_LATENCY_SECONDS.observe((now_at - last_at) / num_tokens)
        elif not self._last_at:
            TIME_TO_FIRST_TOKEN_SECONDS.observe(now_at - self._arrived_at)
        self._last_at[choice] = now_at
