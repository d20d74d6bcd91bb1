"""The cluster secret: every call between the processes of a cluster bears it, and every server checks it first.

Health checks need none: they come from orchestrators, and tell nothing but whether the process serves.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Counter

from shared.base.errors import ConfigError, Unauthorized
from shared.options.peers import PeerConfig, check_secret
from shared.wire.errors import status_of
from shared.wire.settings import read_file

log = logging.getLogger(__name__)

_KEY = "twostroke-cluster-secret"
_HEALTH = "/grpc.health.v1.Health/"
_WARN_EVERY_S = 60.0

refused_calls = Counter("twostroke_refused_calls_total", "gRPC calls without the cluster secret, or with a wrong one")

Metadata = tuple[tuple[str, str], ...]


def read_cluster_secret(config: PeerConfig) -> str:
    """Empty if there is none. Reads the file if one is named; raises ConfigError for one that cannot be used."""
    path = config.cluster_secret_file
    if not path:
        return config.cluster_secret
    try:
        secret = read_file(path).decode().strip()
        check_secret(secret, f"the secret in --cluster-secret-file {path}")
    except ValueError as error:
        raise ConfigError(str(error) if not isinstance(error, UnicodeDecodeError) else f"{path} is not a text file") from None
    if Path(path).stat().st_mode & 0o007:
        log.warning("every user of this machine may read or write the cluster secret in %s: chmod 600 mends that", path)
    return secret


def metadata_of(secret: str) -> Metadata:
    """What a call bears."""
    return ((_KEY, secret),) if secret else ()


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not bear the secret, before anything of their messages is read."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._refuse = grpc.stream_stream_rpc_method_handler(self._refuse_call)  # whatever the method: it reads nothing
        self._warned_at = float("-inf")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        details = handler_call_details
        if details.method.startswith(_HEALTH) or self._is_borne_by(details.invocation_metadata):
            return await continuation(details)
        return self._refuse

    def _is_borne_by(self, metadata: Any) -> bool:
        values = [value for key, value in metadata if key == _KEY]
        return len(values) == 1 and hmac.compare_digest(values[0].encode(), self._secret)

    async def _refuse_call(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        refused_calls.inc()
        now = time.monotonic()
        if now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            log.warning("refused a call from %s: it does not bear this cluster's secret", context.peer())
        await context.abort(*status_of(Unauthorized("the call does not bear this worker's cluster secret")))
