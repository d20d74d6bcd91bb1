"""What a receiver offers, best first, and where it finds the landing of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.base.errors import IncompatiblePeer
from shared.rpc import kv_pb2
from shared.transfer.transports.interface import Host, Landing, Route


class Hosts:
    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host for host in hosts}

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def offers(self) -> list[kv_pb2.Offer]:
        return [host.offer() for host in self._hosts.values()]

    def landing(self, route: Route, on_lost: Callable[[], None]) -> Landing:
        """Raises IncompatiblePeer for a transport that is not offered, LinkLost for a link that is not there."""
        return self.find(route.transport).landing(route, on_lost)

    def find(self, transport: str) -> Host:
        host = self._hosts.get(transport)
        if host is None:
            raise IncompatiblePeer(f"transport is {transport!r}; this worker offers {', '.join(self._hosts)}")
        return host

    async def close(self) -> None:
        for host in self._hosts.values():
            await host.close()
