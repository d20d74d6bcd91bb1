"""Who is there and who holds what: the registry of workers and the index of prefix blocks, soft state in Redis.

    worker   `registration.py`    entry and heartbeats ─┐                ┌─> `watcher.py`, `fleet_view.py`   router: who is there
             `block_publisher.py` hashes of its cache  ─┼─> Redis ───────┼─> `prefix_index.py`               router: who holds it
             `recent_holders.py`  who stored it last   ─┘   `keys.py`    └─> `entries.py`                    all of it is checked

`connection.py` makes the clients: every operation has a deadline. What Redis loses comes back with the next heartbeat.

    heartbeat   a worker's entry, published every second      roster   ids of the workers that have an entry
    stale       heartbeats overdue, entry not yet expired     holder   a worker that has a block in its cache
    marker      the version of a set of hashes, in the set    doubt    a worker that does not know its set's version sends all anew
"""
