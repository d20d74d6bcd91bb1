"""What lies where in Redis.

Every key has a TTL that its worker's heartbeat renews, so a fleet that is gone leaves nothing behind. All names begin with the
namespace, the channels' too: Redis' database numbers separate keys only.

    twostroke:<namespace>:worker:<worker id>             string   the entry: WorkerInfo as JSON
    twostroke:<namespace>:roster                         zset     worker ids by the time, in ms, at which their entries expire
    twostroke:<namespace>:blocks:<worker id>:<boot id>   set      hashes of the blocks in that worker's cache, and a version marker
    twostroke:<namespace>:holders                        string   of each block, who stored it last; in large fleets only
    twostroke:<namespace>:heartbeats                     channel  WorkerInfo as JSON, at every heartbeat
    twostroke:<namespace>:goodbyes                       channel  Goodbye as JSON, when a worker stops
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.base.worker_info import BootId, WorkerId
from shared.options.peers import DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of the keys and channels of one namespace."""

    namespace: str = DEFAULT_NAMESPACE

    @property
    def roster(self) -> str:
        return self._named("roster")

    @property
    def holders(self) -> str:
        return self._named("holders")

    @property
    def heartbeats(self) -> str:
        return self._named("heartbeats")

    @property
    def goodbyes(self) -> str:
        return self._named("goodbyes")

    def entry(self, worker_id: WorkerId) -> str:
        return self._named(f"worker:{worker_id}")

    def blocks(self, worker_id: WorkerId, boot_id: BootId) -> str:
        return self._named(f"blocks:{worker_id}:{boot_id}")

    def _named(self, name: str) -> str:
        return f"twostroke:{self.namespace}:{name}"
