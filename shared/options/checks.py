"""Checks that several sets of options share. Each raises ValueError, which names the flag, the bad value and what is allowed."""

from __future__ import annotations

from shared.base.address import Address, is_any_host, is_host
from shared.base.worker_info import MAX_ID_CHARS


def check_at_least(minimum: int, config: object, *names: str) -> None:
    """Options that are None are left out."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {minimum}")


def check_listener(host: str, port: int) -> None:
    if not is_host(host):
        raise ValueError(f"--host is {host!r}; it must be a name or an IP address of this machine, such as 127.0.0.1 or ::1")
    check_port(port, "--port")


def check_port(port: int | None, flag: str) -> None:
    if port is not None and not 0 <= port < 65536:
        raise ValueError(f"{flag} is {port}; it must be between 0 and 65535")


def check_advertised(address: str) -> None:
    """Empty: there is none."""
    if not address:
        return
    try:
        host = Address.parse(address).host
    except ValueError as error:
        raise ValueError(f"--advertise: {error}") from None
    if is_any_host(host):
        raise ValueError(f"--advertise is {address}, which is no address of one machine; it must be one that others reach")


def check_served_name(name: str) -> None:
    """As routers accept it in the registry."""
    if not (1 <= len(name) <= MAX_ID_CHARS and name.isprintable()):
        raise ValueError(f"--served-model-name is {name[:100]!r}; it must have 1 to {MAX_ID_CHARS} printable characters")


def served_name(model: str, served_model_name: str) -> str:
    """The name that clients use: what the operator says, else the last part of the model's folder or hub id."""
    return served_model_name or model.rstrip("/").rsplit("/", 1)[-1]
