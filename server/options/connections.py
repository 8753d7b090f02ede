"""Options of `windlass serve` that bound connections. Knows how they are spelt; starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_network
from typing import Annotated

from windlass.engine.errors import LoadError
from windlass.server.options.connection_settings import EVERYBODY, ConnectionSettings, Network
from windlass.server.options.panels import CONNECTIONS
from windlass.server.options.spelling import check_seconds, option, split


@dataclass(slots=True, kw_only=True)
class ConnectionOptions:
    """How many connections are held, and how long each may keep the server waiting."""

    max_connections: Annotated[
        int,
        option(
            "--max-connections",
            panel=CONNECTIONS,
            help="Connections held at once; further ones get 503 unless one "
            "that has sent no request can be closed instead. Never more than the limit of open files leaves room for.",
        ),
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        option(
            "--max-connections-per-address",
            panel=CONNECTIONS,
            help="Connections held at once by one address; further ones get 429.",
        ),
    ] = 512
    forwarded_allow_ips: Annotated[
        list[str] | None,
        option(
            "--forwarded-allow-ips",
            panel=CONNECTIONS,
            help="Proxies to trust, as addresses or networks, * for all; "
            "repeatable or comma separated: their X-Forwarded-For is believed, and they may hold any number of "
            "connections. Default: 127.0.0.1.",
        ),
    ] = None
    header_timeout: Annotated[
        float,
        option(
            "--header-timeout", panel=CONNECTIONS, help="Seconds a client has for the line and headers of a request."
        ),
    ] = 10.0
    keep_alive_timeout: Annotated[
        float,
        option("--keep-alive-timeout", panel=CONNECTIONS, help="Seconds a connection may rest between two requests."),
    ] = 75.0
    write_timeout: Annotated[
        float,
        option(
            "--write-timeout",
            panel=CONNECTIONS,
            help="A client that takes no byte of its answer for so many seconds is dropped, and its request aborted.",
        ),
    ] = 60.0

    def to_settings(self) -> ConnectionSettings:
        """Raises LoadError that names the option at fault."""
        for name in ("max_connections", "max_connections_per_address"):
            if getattr(self, name) < 1:
                raise LoadError(f"{_spelt(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("header_timeout", "keep_alive_timeout", "write_timeout"):
            check_seconds(_spelt(name), getattr(self, name), zero=False)
        given = split(self.forwarded_allow_ips)
        return ConnectionSettings(
            max_connections=self.max_connections,
            max_per_address=self.max_connections_per_address,
            **({"trusted_proxies": _networks(given)} if given else {}),
            header_seconds=self.header_timeout,
            idle_seconds=self.keep_alive_timeout,
            write_seconds=self.write_timeout,
        )


def _spelt(name: str) -> str:
    return "--" + name.replace("_", "-")


def _networks(given: list[str]) -> tuple[Network, ...]:
    if "*" in given:
        return EVERYBODY
    networks = []
    for text in given:
        try:
            networks.append(ip_network(text))
        except ValueError:
            raise LoadError(
                f"--forwarded-allow-ips {text} is no address: write 10.0.0.7, a network as 10.0.0.0/8, or *"
            ) from None
    return tuple(networks)
