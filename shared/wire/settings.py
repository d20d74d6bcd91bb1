"""What every gRPC server and channel of this project is set to."""

from __future__ import annotations

from pathlib import Path

from shared.base.errors import ConfigError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# Keep-alive notices a silent peer within two seconds, also while a call streams nothing.
GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # a minute by default, and it is this timer that counts
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a second server on one port must fail, not share it
    ("grpc.enable_http_proxy", 0),  # http_proxy and its kind are for the way out; peers are in the cluster
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def read_file(path: str) -> bytes:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
