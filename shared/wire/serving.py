"""How every gRPC server of this project is made: limits, TLS, the cluster secret, health, and errors that keep their type."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared.base.address import Address, is_loopback
from shared.base.errors import ConfigError, Internal, InvalidRequest, TwostrokeError
from shared.options.peers import PeerConfig
from shared.wire.cluster_secret import SecretInterceptor, read_cluster_secret
from shared.wire.errors import status_of
from shared.wire.settings import GRPC_OPTIONS, read_file

log = logging.getLogger(__name__)


class Server:
    """A gRPC server with a health service and typed errors. `bind` it, `add` services, `start`, and `stop`."""

    def __init__(self, config: PeerConfig) -> None:
        """Raises ConfigError for a file that cannot be read."""
        secret = read_cluster_secret(config)
        checks = [SecretInterceptor(secret)] if secret else []
        self._credentials = _credentials(config)
        self._is_open_to_all = not secret and self._credentials is None
        self._server = grpc.aio.server(interceptors=[*checks, _ErrorInterceptor()], options=GRPC_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [""]

    def add(self, register: Callable[[Any, Any], None], servicer: object, name: str) -> None:
        """`register` is the generated add_…_to_server; `name` the full service name for health checks."""
        register(servicer, self._server)
        self._names.append(name)

    def bind(self, host: str, port: int) -> int:
        """Returns the real port. Raises ConfigError if the address cannot be had."""
        address = str(Address(host, port))
        bound: int
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise ConfigError(f"cannot listen on {address}: the port is in use or the address is not this machine's")
        if self._is_open_to_all and not is_loopback(host):
            log.warning("whoever reaches %s may use this worker: give the cluster a secret with --cluster-secret-file", address)
        return bound

    async def start(self) -> None:
        """Serves what has been added."""
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end within `grace_s`, then cancels them."""
        await self._server.stop(grace_s)


def _credentials(config: PeerConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert:
        return None
    pair = (read_file(config.tls_key), read_file(config.tls_cert))
    return grpc.ssl_server_credentials([pair], root_certificates=read_file(config.tls_ca), require_client_auth=True)


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a TwostrokeError raised by a handler into its status; anything else is logged and becomes INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc.health."):
            return handler
        codecs = (_parser(handler.request_deserializer), handler.response_serializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream, method), *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(_guard_unary(_checked(handler.stream_unary), method), *codecs)
        return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary, method), *codecs)


class _Malformed:
    """Stands for bytes that are no message, up to where an error can be answered: gRPC itself would call it UNKNOWN."""


def _parser(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return parse


def _well_formed(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidRequest("the message cannot be parsed")
    return request


def _checked(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A handler of a stream of requests, which ends with InvalidRequest at the first one that is no message."""

    async def well_formed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            yield _well_formed(request)

    async def checked(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await call(well_formed(requests), context)

    return checked


def _guard_unary(call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await call(_well_formed(request), context)
        except Exception as error:
            await _abort(context, error, method)

    return guarded


def _guard_stream(call: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async for reply in call(_well_formed(request), context):
                yield reply
        except Exception as error:
            await _abort(context, error, method)

    return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, TwostrokeError):
        log.exception("%s failed", method, exc_info=error)
        error = Internal(f"{method} failed: {type(error).__name__}")
    code, details, trailing = status_of(error)
    await context.abort(code, details, trailing)
