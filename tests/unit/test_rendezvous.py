"""The rendezvous of a communicator: where it listens, and who finds what in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.transfer.transports.group.communicator import connect_store, serve_store

OURS, OTHER = b"a" * 16, b"b" * 16


def listeners(port: int) -> set[str]:
    """The local addresses, in the kernel's notation, at which something listens on this port."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F"), ("localhost", None)])
def test_it_listens_at_the_address_that_it_is_told_and_no_other(host: str, address: str | None) -> None:
    store, port = serve_store(host, OURS, 3.0)
    found = listeners(port)
    assert len(found) == 1
    assert found <= ({address} if address else {"0100007F", "00000000000000000000000001000000"})
    del store


def test_keys_are_found_only_by_who_knows_the_pairs_id() -> None:
    store, port = serve_store("127.0.0.1", OURS, 3.0)
    store.set("rank1", "sender")
    assert connect_store("127.0.0.1", port, OURS, 3.0).get("rank1") == b"sender"
    stranger = connect_store("127.0.0.1", port, OTHER, 3.0)
    assert not stranger.check(["rank1"])
    stranger.set("rank1", "stranger")
    assert store.get("rank1") == b"sender"


def test_an_address_that_is_not_this_machines_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="assign"):
        serve_store("192.0.2.1", OURS, 3.0)
