"""How many connections a server holds and how long each may keep it waiting. Plain data; knows nothing of sockets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

Network = IPv4Network | IPv6Network

RESERVED_DESCRIPTORS = 128  # for the engine's pipes, the listener, files and worker processes
EVERYBODY: tuple[Network, ...] = (ip_network("0.0.0.0/0"), ip_network("::/0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Bounds on connections; times are seconds.

    max_connections: held at once. max_per_address: held at once by one IPv4 address, or one IPv6 network of 64 bits.
    trusted_proxies: addresses that speak for many clients: max_per_address does not hold for them.
    header_seconds: from the start of a connection, or the first byte of a further request, to the end of the
    request's head, however its bytes come. idle_seconds: between two requests of a connection.
    write_seconds: without a byte taken by the client while there is something to send.
    """

    max_connections: int = 8192
    max_per_address: int = 512
    trusted_proxies: tuple[Network, ...] = (IPv4Network("127.0.0.1"),)
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    write_seconds: float = 60.0

    def within(self, descriptors: int) -> ConnectionSettings:
        """The same with no more connections than a process with so many file descriptors has room for."""
        total = max(1, min(self.max_connections, descriptors - RESERVED_DESCRIPTORS))
        return replace(self, max_connections=total, max_per_address=min(self.max_per_address, total))

    def trusts(self, address: str) -> bool:
        """Whether this address is one of `trusted_proxies`. Who comes to a Unix socket ("") is: its file says who may."""
        if not address:
            return True
        parsed = ip_address(address.partition("%")[0])
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(parsed in network for network in self.trusted_proxies)


def holder(address: str) -> str:
    """What connections are counted by: the address, or of an IPv6 address its network of 64 bits, which belongs to one holder."""
    if ":" not in address:
        return address
    parsed = ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or ip_network((parsed, 64), strict=False))
