"""Addresses of processes: one way to read and to write them, with IPv6 in brackets."""

from __future__ import annotations

import pytest

from shared.base.address import Address, is_any_host, is_host, is_loopback


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("worker-1:7001", "worker-1", 7001),
        ("a.b_c.example.:1", "a.b_c.example.", 1),
        ("192.0.2.7:65535", "192.0.2.7", 65535),
        ("[::1]:7001", "::1", 7001),
        ("[2001:db8::7]:80", "2001:db8::7", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_an_address_is_read_and_written_back_the_same(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":7001", "host:0", "host:65536", "host:007001", "host:+1", "host:1 ", "host:\u0661", "host:-1"),
        *("::1:7001", "[::1]", "[::1]7001", "[host]:1", "[127.0.0.1]:1", "::1", "[::1:7001", "::1]:7001", "[]:1", "[[::1]]:1"),
        *("a b:1", "a/b:1", "http://a:1", "user@a:1", "-a:1", "a..b:1", "a\n:1", "h\u00f6st:1", "0:1", "127.1:1", "256.0.0.1:1"),
        "a" * 300 + ":1",
    ],
)
def test_what_is_not_an_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port, such as .*\[2001:db8::7\]:7001"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"])
def test_listeners_on_every_address_are_known_as_such(host: str) -> None:
    assert is_any_host(host)
    assert is_host(host)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST."])
def test_loopback_is_known_by_name_and_by_address(host: str) -> None:
    assert is_loopback(host)
    assert not is_any_host(host)


@pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7", "worker-1", "localhost.example"])
def test_other_hosts_are_neither(host: str) -> None:
    assert not is_loopback(host)
    assert not is_any_host(host)


@pytest.mark.parametrize("host", ["", "[::1]", "0", "127.1", "a:b", "a b", "."])
def test_what_is_no_host_is_known(host: str) -> None:
    assert not is_host(host)
