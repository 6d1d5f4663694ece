"""The guard of requests to addresses that users chose: it lets nobody use this server to reach what only it can reach.

A name is resolved, every address it has is checked, and the connection goes to an address that was checked, so that a name
which means something else a moment later is no way round.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpcore
import httpx

Address = IPv4Address | IPv6Address

MAX_URL = 2048
HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+:[0-9a-f:.]*", re.ASCII)
EMBEDS_IPV4 = IPv6Network("64:ff9b::/96")
"""Addresses by which a machine that has IPv6 only reaches the others (NAT64)."""
SITE_LOCAL = IPv6Network("fec0::/10")
METADATA = frozenset({ip_address("168.63.129.16"), ip_address("fd00:ec2::254"), ip_address("100.100.100.200")})
"""Where clouds tell a machine its secrets, beside the link-local addresses that most use."""
RESERVED = IPv4Network("0.0.0.0/8")
"""`0.0.0.0` is this machine."""


class AddressRefused(Exception):
    """A request would go where requests of users may not go."""


def check_url(url: str, *, allow_private: bool) -> None:
    """Refuse a URL that cannot be meant, or that names an address outright which is refused. Resolves no name.

    Raises ValueError with what is wrong with it.
    """
    if len(url) > MAX_URL:
        raise ValueError(f"must have at most {MAX_URL} characters")
    if url.startswith("/"):
        raise ValueError("must be a whole URL: paths of this server are not supported")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https"):
        raise ValueError("must start with http:// or https://")
    host = parsed.raw_host.decode("ascii").lower()
    if not HOST.fullmatch(host) or not (parsed.port is None or 0 < parsed.port < 2**16):
        raise ValueError("has no valid host or port")
    if parsed.userinfo:
        raise ValueError("must not hold a user or a password")
    try:
        address: Address | None = ip_address(host)
    except ValueError:
        address = ip_address("127.0.0.1") if host.rstrip(".") == "localhost" else None
    if address is not None:
        try:
            refuse(host, [address], allow_private=allow_private)
        except AddressRefused as error:
            raise ValueError(str(error)) from None


def refuse(host: str, addresses: Iterable[Address], *, allow_private: bool) -> None:
    """Raise AddressRefused if one of a host's addresses is not for users' requests."""
    for address in addresses:
        if never(address) or not (allow_private or public(address)):
            raise AddressRefused(f"{host} is not a public address")


def public(address: Address) -> bool:
    """Whether an address means the same machine for everybody."""
    address = _meant(address)
    return address.is_global and not never(address) and not (isinstance(address, IPv6Address) and address in SITE_LOCAL)


def never(address: Address) -> bool:
    """Whether an address is nobody's whom one could want to talk to, or a cloud's metadata service."""
    address = _meant(address)
    return (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address in METADATA
        or (isinstance(address, IPv4Address) and address in RESERVED)
    )


def _meant(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, IPv4Address):
        return address
    if address in EMBEDS_IPV4 or (int(address) >> 32 == 0 and int(address) > 1):  # the latter form is long out of use
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else address)


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections for httpcore to addresses that were checked."""

    def __init__(self, inner: httpcore.AsyncNetworkBackend, *, allow_private: bool) -> None:
        self._inner = inner
        self._allow_private = allow_private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (httpcore's signature)
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await resolve(host, port)
        refuse(host, addresses, allow_private=self._allow_private)
        failed: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._inner.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise AddressRefused("A socket of this machine is not a public address")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def resolve(host: str, port: int) -> list[Address]:
    """All addresses of a host, in the order of preference, each once."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(f"{host} cannot be resolved: {error}") from error
    return list(dict.fromkeys(ip_address(sockaddr[0]) for *_, sockaddr in found))


class GuardedTransport(httpx.AsyncHTTPTransport):
    """A transport of httpx behind the guard. `allow_private`: machines of the own network, and this one, may be reached.

    Link-local, multicast and metadata addresses are refused in any case. Beside a transport httpx uses no proxy of the
    environment, which would resolve names by itself.
    """

    def __init__(self, *, allow_private: bool, max_connections: int = 100) -> None:
        super().__init__(limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=20))
        # httpx takes no backend. Reading the old one first makes sure that this is where it is.
        pool: Any = self._pool
        pool._network_backend = GuardedBackend(pool._network_backend, allow_private=allow_private)
