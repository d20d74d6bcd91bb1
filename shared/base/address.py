"""host:port of a process: read, checked and written in one place.

An IPv6 host stands in brackets where a port follows: [::1]:7001.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_ONLY_DIGITS = re.compile(r"[0-9.]*")  # not a name: some resolvers read 0 or 127.1 as IPv4 addresses


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process listens, or where others reach it. `host` is a name or an IP address without brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError, naming what is allowed, for anything but host:port with a port from 1 to 65535."""
        host, colon, port = text.rpartition(":")
        in_brackets = host.startswith("[") and host.endswith("]")
        bare = host[1:-1] if in_brackets else host
        number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
        if not (colon and is_host(bare) and in_brackets == (":" in bare) and 0 < number < 65536):
            raise ValueError(f"{text[:300]!r} is not host:port, such as worker-1:7001, 192.0.2.7:7001 or [2001:db8::7]:7001")
        return cls(bare, number)

    def __str__(self) -> str:
        return f"{url_host(self.host)}:{self.port}"


def url_host(host: str) -> str:
    """`host` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_host(text: str) -> bool:
    """Whether this is a host's name or an IP address, without brackets."""
    return _ip(text) is not None or bool(_NAME.fullmatch(text) and not _ONLY_DIGITS.fullmatch(text))


def is_any_host(host: str) -> bool:
    """Whether a listener there takes calls to every address of its machine: 0.0.0.0 or ::."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether only processes of the same machine reach a listener there."""
    ip = _ip(host)
    return ip.is_loopback if ip is not None else host.rstrip(".").lower() == "localhost"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
