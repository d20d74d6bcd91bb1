"""A listening TCP socket on an IPv4 or IPv6 address, or a reason in one line why there is none."""

from __future__ import annotations

import errno
import socket

from shared.base.address import Address
from shared.base.errors import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Port 0 takes a free one. A name with both kinds of addresses means the IPv4 one; :: takes IPv4 too. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        is_dual = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    except OSError as error:
        reason = "the port is in use; choose another with --port" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot listen on {Address(host, port)}: {reason}") from None
