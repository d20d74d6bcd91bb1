"""What lies where in Redis.

Every key has a TTL that its worker's heartbeat renews, so a fleet that is gone leaves nothing behind.

    twostroke:worker:<worker id>             string   the entry: WorkerInfo as JSON
    twostroke:roster                         zset     worker ids by the time, in ms, at which their entries expire
    twostroke:blocks:<worker id>:<boot id>   set      hashes of the blocks in that worker's cache, and a version marker
    twostroke:heartbeats                     channel  WorkerInfo as JSON, at every heartbeat
    twostroke:goodbyes                       channel  Goodbye as JSON, when a worker stops
"""

from __future__ import annotations

ROSTER = "twostroke:roster"
HEARTBEATS = "twostroke:heartbeats"
GOODBYES = "twostroke:goodbyes"


def entry_key(worker_id: str) -> str:
    return f"twostroke:worker:{worker_id}"


def blocks_key(worker_id: str, boot_id: str) -> str:
    return f"twostroke:blocks:{worker_id}:{boot_id}"
