"""Check of the headers Host and Origin, against DNS rebinding and pages of other origins."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.server.config.settings import Binding, ServerSettings
from windlass.server.errors import ApiError, error_response

_AUTHORITY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[\w.-]{1,254}))(?::(?P<port>[0-9]*))?", re.ASCII)

_DEFAULT_PORTS = {"http": "80", "https": "443"}

_MAX_SHOWN = 200  # characters of a header in a message


def binding_of(listener: socket.socket) -> Binding:
    """The kind of address at which a socket listens. A Unix socket, which browsers reach only by a proxy, counts as a network."""
    return "loopback" if is_loopback_host(listener.getsockname()[0]) else "network"


def is_loopback_host(name: str) -> bool:
    """Whether a host name in lower case or an address always means the machine itself."""
    address = _address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _split(authority: str) -> tuple[str, str]:
    """Host name in lower case and port of an authority such as `localhost:8000`; "" for each that is absent or malformed."""
    match = _AUTHORITY.fullmatch(authority.lower())
    if match is None:
        return "", ""
    name = (match["ipv6"] or match["name"]).removesuffix(".")
    address = _address(name)
    return name if address is None else str(address), match["port"] or ""


class HostMiddleware:
    """Refuses requests for unknown hosts (421) and of pages of other origins (403); see `ServerSettings`.

    In DNS rebinding a page's own name is resolved to the address of this server, so that the browser takes its requests for
    those of one origin. Such requests have the page's name as their host. No page can do that with an IP address as its host.
    """

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._find_error(dict(scope["headers"])) if scope["type"] == "http" else None
        app = self._app if error is None else error_response(error, scope)
        await app(scope, receive, send)

    def _find_error(self, headers: dict[bytes, bytes]) -> ApiError | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if self._settings.checks_hosts and b"host" in headers and not self._knows(_split(host)[0]):
            # RFC 9110, 15.5.20: the request was not meant for this server.
            return ApiError(
                421,
                f"this server does not answer to the host {host[:_MAX_SHOWN]!r}: if clients reach it by this name, start it with "
                f"--allowed-hosts {_split(host)[0] or 'NAME'}",
                param="host",
                code="host_not_allowed",
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        if self._settings.checks_origins and b"origin" in headers and not self._allows_origin(origin, host, headers):
            return ApiError(
                403,
                f"pages of the origin {origin[:_MAX_SHOWN]!r} may not use this server, whose host is {host[:_MAX_SHOWN]!r}: to "
                "permit them start it with --cors-origin and this origin; if this is its own address, at a proxy that changes "
                "the host, with --allowed-hosts and this name",
                param="origin",
                code="origin_not_allowed",
            )
        return None

    def _knows(self, name: str) -> bool:
        if is_loopback_host(name) or self._is_listed(name):
            return True
        return self._settings.binding != "loopback" and _address(name) is not None  # such as the probes of Kubernetes

    def _is_listed(self, name: str) -> bool:
        return any(
            entry in ("*", name) or (entry.startswith("*.") and name.endswith(entry[1:]))
            for entry in self._settings.allowed_hosts
        )

    def _allows_origin(self, origin: str, host: str, headers: dict[bytes, bytes]) -> bool:
        if "*" in self._settings.cors_origins or origin in self._settings.cors_origins:
            return True
        if headers.get(b"sec-fetch-site") == b"same-origin":  # no page can set it: a proxy has changed the host
            return True
        scheme, _, authority = origin.partition("://")
        (name, port), (own, own_port) = _split(authority), _split(host)
        default = _DEFAULT_PORTS.get(scheme, "")
        return bool(name) and ((name, port or default) == (own, own_port or default) or self._is_listed(name))
