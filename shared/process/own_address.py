"""The address at which others reach this process.

Whoever listens on one address is reached there. Who listens on all of its machine's is reached at the one from which this machine
speaks to the Redis, since whoever finds this process has found that Redis too. If the Redis is on this machine, it is the address
from which this machine speaks to others.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from shared.base.address import Address, is_any_host, is_loopback
from shared.base.errors import ConfigError

_REDIS_PORT = 6379
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # for documentation: always beyond the default route


def own_address(host: str, port: int, advertise: str, redis_url: str) -> Address:
    """`advertise` if it is given. Raises ConfigError, naming --advertise, if there is no address that others reach."""
    if advertise:
        return Address.parse(advertise)
    return Address(_own_host(host, redis_url) if is_any_host(host) else host, port)


def _own_host(any_host: str, redis_url: str) -> str:
    family = socket.AF_INET6 if ":" in any_host else socket.AF_INET
    families = [family, socket.AF_INET] if family == socket.AF_INET6 else [family]  # a listener on :: takes IPv4 too
    for family in families:
        for target in (_redis_host(redis_url), (_ELSEWHERE[family], _REDIS_PORT)):
            own = _host_towards(target, family) if target is not None else None
            if own is not None and not is_loopback(own):
                return own
    raise ConfigError(
        f"--host is {any_host}, and no address of this machine leads to others: name one that they reach with --advertise host:port"
    )


def _redis_host(url: str) -> tuple[str, int] | None:
    """None for a unix socket, and for a URL that the client will refuse."""
    try:
        parts = urlsplit(url)
        return None if parts.scheme == "unix" else (parts.hostname or "localhost", parts.port or _REDIS_PORT)
    except ValueError:
        return None


def _host_towards(target: tuple[str, int], family: socket.AddressFamily) -> str | None:
    """This machine's address on the way there, None if there is no way. A UDP socket that connects sends nothing."""
    try:
        address = socket.getaddrinfo(*target, family=family, type=socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
