"""The sender's links to receivers: made on demand, kept while they live, one per receiving process.

A receiver is asked once for what it offers. The best transport that both know is tried first; where it turns out not to work
(another machine, a container with its own files, a closed port) the next best is used, and the better one is tried again after a
while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from shared.base.errors import IncompatiblePeer
from shared.rpc import kv_pb2
from shared.transfer.handoff import metrics
from shared.transfer.transports.interface import GRPC, Connector, Link, LinkLost, Peer
from shared.wire.errors import from_rpc_error

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 300.0  # a try may cost the transfers that wait for it seconds
_OFFERS_TIMEOUT_S = 5.0
_MAX_PEERS = 256


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of one receiver. The lock makes concurrent transfers share the making of its link."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    offers: Mapping[str, kv_pb2.Offer] | None = None
    retry_at: dict[str, float] = field(default_factory=dict)  # by transport that did not work
    name: str = ""
    link: Link | None = None


class Links:
    def __init__(self, connectors: Sequence[Connector]) -> None:
        """`connectors` are what this process can do, best first."""
        self._connectors = connectors
        self._known: OrderedDict[str, _Known] = OrderedDict()

    @property
    def transports(self) -> tuple[str, ...]:
        return tuple(connector.name for connector in self._connectors)

    async def get(self, peer: Peer) -> Link:
        """Raises IncompatiblePeer if the two have no transport in common, LinkLost if none works now, and what the question for
        offers may raise."""
        known = self._known.get(peer.boot_id)
        if known is None:
            known = self._known[peer.boot_id] = _Known()
        self._known.move_to_end(peer.boot_id)
        if len(self._known) > _MAX_PEERS:
            _discard(self._known.popitem(last=False)[1])
        async with known.lock:
            if known.offers is None:
                known.offers = await _ask(peer)
            for connector in self._connectors:
                if known.name == connector.name and known.link is not None and known.link.is_alive:
                    return known.link
                if connector.name in known.offers and known.retry_at.get(connector.name, 0.0) <= time.monotonic():
                    link = await self._connect(connector, peer, known)
                    if link is not None:
                        return link
        raise self._no_link(known.offers)

    async def close(self) -> None:
        while self._known:
            _discard(self._known.popitem()[1])

    async def _connect(self, connector: Connector, peer: Peer, known: _Known) -> Link | None:
        assert known.offers is not None
        try:
            link = await connector.connect(peer, known.offers[connector.name])
        except LinkLost as error:
            log.info("no %s link to boot %s: %s", connector.name, peer.boot_id, error)
            metrics.links.labels(connector.name, "failed").inc()
            known.retry_at[connector.name] = time.monotonic() + _RETRY_AFTER_S
            return None
        log.info("blocks for boot %s go by %s", peer.boot_id, connector.name)
        metrics.links.labels(connector.name, "made").inc()
        known.name, known.link = connector.name, link
        return link

    def _no_link(self, offers: Mapping[str, kv_pb2.Offer]) -> Exception:
        ours = ", ".join(self.transports)
        if not set(self.transports) & set(offers):
            return IncompatiblePeer(f"the decode worker offers {', '.join(offers)}; this worker is told to use {ours}")
        return LinkLost(f"no link could be made by {ours}")


async def _ask(peer: Peer) -> dict[str, kv_pb2.Offer]:
    try:
        reply = await peer.stub.GetOffers(kv_pb2.OffersRequest(), timeout=_OFFERS_TIMEOUT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a worker of the first version
            return {GRPC: kv_pb2.Offer(transport=GRPC)}
        raise from_rpc_error(error) from None
    return {offer.transport: offer for offer in reply.offers}


def _discard(known: _Known) -> None:
    if known.link is not None:
        known.link.discard()
