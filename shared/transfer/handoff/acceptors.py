"""What a receiver offers, best first, and where it finds the landing of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.base.errors import IncompatiblePeer
from shared.rpc import kv_pb2
from shared.transfer.transports.interface import Acceptor, Landing, Route


class Acceptors:
    def __init__(self, acceptors: Sequence[Acceptor]) -> None:
        self._acceptors = {acceptor.name: acceptor for acceptor in acceptors}

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(self._acceptors)

    def offers(self) -> list[kv_pb2.Offer]:
        return [acceptor.offer() for acceptor in self._acceptors.values()]

    def landing(self, route: Route, on_lost: Callable[[], None]) -> Landing:
        """Raises IncompatiblePeer for a transport that is not offered, LinkLost for a link that is not there."""
        return self.find(route.transport).landing(route, on_lost)

    def find(self, transport: str) -> Acceptor:
        acceptor = self._acceptors.get(transport)
        if acceptor is None:
            raise IncompatiblePeer(f"transport is {transport!r}; this worker offers {', '.join(self._acceptors)}")
        return acceptor

    async def close(self) -> None:
        for acceptor in self._acceptors.values():
            await acceptor.close()
