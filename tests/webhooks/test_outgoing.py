"""The guard of outgoing requests: nobody reaches through this server what only it can reach."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fakes.receiver import Receiver, receiving

from app.outgoing import AddressRefused, GuardedTransport, check_url, never, public

LOCAL = ["127.0.0.1", "127.8.8.8", "::1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "fc00::1", "100.64.0.1", "fec0::1"]
NEVER = [
    "169.254.169.254",
    "169.254.1.1",
    "fe80::1",
    "0.0.0.0",
    "0.1.2.3",
    "::",
    "224.0.0.1",
    "ff02::1",
    "168.63.129.16",
    "100.100.100.200",
    "fd00:ec2::254",
]
ODD = ["192.0.2.1", "198.18.0.1", "240.0.0.1", "255.255.255.255", "2001:db8::1"]
PUBLIC = ["8.8.8.8", "93.184.215.14", "2606:4700::1111"]
FORMS = ["::ffff:{}", "64:ff9b::{}", "::{}"]


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def forms(address: str) -> list[str]:
    """An IPv4 address, and how IPv6 writes it."""
    return [address] if ":" in address else [address, *(form.format(address) for form in FORMS)]


def client(*, allow_private: bool) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=GuardedTransport(allow_private=allow_private), timeout=5, trust_env=False)


def test_which_addresses_are_public() -> None:
    for address in [*LOCAL, *NEVER, *ODD]:
        for form in forms(address):
            assert not public(ip_address(form)), form
    for address in PUBLIC:
        for form in forms(address):
            assert public(ip_address(form)), form


def test_which_addresses_stay_closed_where_private_ones_are_open() -> None:
    for address in NEVER:
        for form in forms(address):
            assert never(ip_address(form)), form
    for address in [*LOCAL, *PUBLIC]:
        for form in forms(address):
            assert not never(ip_address(form)), form


def test_a_url_is_checked_before_anything_is_resolved() -> None:
    for url in ("https://example.com/hook?x=1", "http://a_b.example:8080", "http://bücher.example/", "https://[2606:4700::1]/"):
        check_url(url, allow_private=False)
    for host in ("127.0.0.1", "[::1]", "localhost", "LocalHost.", "10.0.0.1:80"):
        check_url(f"http://{host}/", allow_private=True)
        with pytest.raises(ValueError, match="public"):
            check_url(f"http://{host}/", allow_private=False)
    for url in ("http://a@b/", "http://:p@b/", "http://[fe80::1%25eth0]/", "http://a\n.b/", "http://a:0/", "http://a/\udcff"):
        with pytest.raises(ValueError, match=r".+"):
            check_url(url, allow_private=True)


HOSTS = [
    "127.0.0.1",
    "localhost",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "0.0.0.0",
    "127.1",
    "0x7f.1",
    "2130706433",
    "10.0.0.1",
    "169.254.169.254",
]


@pytest.mark.parametrize("host", HOSTS)
async def test_a_connection_is_refused(receiver: Receiver, host: str) -> None:
    async with client(allow_private=False) as http:
        with pytest.raises(AddressRefused, match="not a public address"):
            await http.post(f"http://{host}:{receiver.port}/", content=b"x")
    assert receiver.received == []


async def test_private_addresses_can_be_allowed_but_not_all(receiver: Receiver) -> None:
    async with client(allow_private=True) as http:
        for host in ("127.0.0.1", "localhost", "2130706433"):
            assert (await http.post(f"http://{host}:{receiver.port}/", content=b"x")).status_code == 204
        for host in ("169.254.169.254", "0.0.0.0", "[::ffff:169.254.169.254]"):
            with pytest.raises(AddressRefused):
                await http.post(f"http://{host}:{receiver.port}/", content=b"x")
    assert len(receiver.received) == 3


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Have the network's resolver answer in turn. Returns what it was asked."""
    left, asked = list(answers), []

    def getaddrinfo(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        kinds = [(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in left.pop(0)]
        return [(kind, socket.SOCK_STREAM, 6, "", (a, port)) for kind, a in kinds]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


async def test_one_private_address_of_a_name_is_enough(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["93.184.215.14", "127.0.0.1"])
    async with client(allow_private=False) as http:
        with pytest.raises(AddressRefused):
            await http.post(f"http://example.test:{receiver.port}/", content=b"x")
    assert receiver.received == []


async def test_the_connection_goes_to_the_address_that_was_checked(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolving(monkeypatch, ["127.0.0.1"])  # a second question would find no answer
    async with client(allow_private=True) as http:
        assert (await http.post(f"http://rebound.test:{receiver.port}/", content=b"x")).status_code == 204
    assert asked == ["rebound.test"]
    assert receiver.received[0].headers["host"] == f"rebound.test:{receiver.port}"


async def test_the_next_address_is_tried_when_one_does_not_answer(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["127.7.7.7", "127.0.0.1"])
    async with client(allow_private=True) as http:
        assert (await http.post(f"http://two.test:{receiver.port}/", content=b"x")).status_code == 204


async def test_proxies_of_the_environment_are_no_way_round(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", receiver.url)
    async with httpx.AsyncClient(transport=GuardedTransport(allow_private=False)) as http:
        with pytest.raises(AddressRefused):
            await http.post(f"http://127.0.0.1:{receiver.port}/", content=b"x")
    assert receiver.received == []
