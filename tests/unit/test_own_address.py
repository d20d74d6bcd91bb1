"""The address that a process registers is one that others reach, and listeners take IPv6 as well as IPv4."""

from __future__ import annotations

import socket

import pytest

from shared.base.address import Address
from shared.base.errors import ConfigError
from shared.process import own_address as module
from shared.process.listener import listen
from shared.process.own_address import own_address

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, socket.AddressFamily], str]:
    """This machine's addresses by where they lead to. Others are out of reach."""
    known: dict[tuple[str, socket.AddressFamily], str] = {}
    monkeypatch.setattr(module, "_host_towards", lambda target, family: known.get((target[0], family)))
    return known


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("worker-1", "worker-1:7")])
def test_who_listens_on_one_address_is_reached_there(ways, host, shown):
    assert str(own_address(host, 7, "", "redis://redis:6379/0")) == shown


def test_what_the_operator_advertises_counts(ways):
    assert own_address("0.0.0.0", 7, "[2001:db8::7]:9", "redis://redis:6379/0") == Address("2001:db8::7", 9)


def test_who_listens_on_all_addresses_is_reached_at_the_one_that_leads_to_the_redis(ways):
    ways |= {("redis", V4): "10.0.0.5", ("192.0.2.1", V4): "203.0.113.5"}
    assert str(own_address("0.0.0.0", 7001, "", "redis://redis:6379/0")) == "10.0.0.5:7001"


def test_who_listens_on_all_ipv6_addresses_is_reached_at_the_one_that_leads_to_the_redis(ways):
    ways |= {("redis", V6): "2001:db8::5", ("redis", V4): "10.0.0.5"}
    assert str(own_address("::", 7001, "", "rediss://user:password@redis/0")) == "[2001:db8::5]:7001"


def test_a_listener_on_all_ipv6_addresses_is_reached_by_ipv4_where_the_redis_has_no_other(ways):
    ways |= {("redis", V4): "10.0.0.5"}
    assert str(own_address("::", 7001, "", "redis://redis:6379/0")) == "10.0.0.5:7001"


@pytest.mark.parametrize("url", ["unix:///tmp/redis", "redis://localhost:6379/0", "redis://127.0.0.1", "redis://redis:99999/0"])
def test_with_the_redis_on_this_machine_it_is_the_address_from_which_it_speaks_to_others(ways, url):
    ways |= {("localhost", V4): "127.0.0.1", ("127.0.0.1", V4): "127.0.0.1", ("192.0.2.1", V4): "203.0.113.5"}
    assert str(own_address("0.0.0.0", 7001, "", url)) == "203.0.113.5:7001"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_machine_that_no_other_reaches_is_told_to_advertise(ways, host):
    ways |= {("localhost", V4): "127.0.0.1", ("localhost", V6): "::1"}
    with pytest.raises(ConfigError, match=f"--host is {host}.*--advertise host:port$"):
        own_address(host, 7001, "", "redis://localhost:6379/0")


def test_the_way_to_a_neighbour_is_found_without_sending_anything():
    assert module._host_towards(("127.0.0.1", 1), V4) == "127.0.0.1"
    assert module._host_towards(("::1", 1), V6) == "::1"
    assert module._host_towards(("::1", 1), V4) is None
    assert module._host_towards(("no-such-host.invalid", 1), V4) is None


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::", "::")],
)
def test_a_listener_binds_what_it_is_told(host, bound):
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == bound


def test_a_listener_on_all_ipv6_addresses_takes_ipv4_too():
    with listen("::", 0) as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as client:
        assert client.getpeername()[0] == "127.0.0.1"


def test_a_port_in_use_is_named_with_brackets_and_how_to_choose_another():
    with listen("::1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            listen("::1", port)
    assert str(refused.value) == f"cannot listen on [::1]:{port}: the port is in use; choose another with --port"


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.9:80: "):
        listen("203.0.113.9", 80)
