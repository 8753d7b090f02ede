"""Listening sockets: TCP, Unix sockets and TLS."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from asyncio import sslproto
from collections.abc import Iterator
from pathlib import Path

from windlass.engine.errors import LoadError, reason_of

READ_BYTES = 32 * 1024  # two TLS records
_BACKLOG = 65535  # the system reduces it to its own maximum
_UMASK = 0o117  # a Unix socket is for its owner and group


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening socket. Raises LoadError with advice for an address that cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise LoadError(f"--host {host} is not an address of this machine ({error.strerror or error})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Clients may connect from now on; they get a response once the app is loaded.
        listener.listen(_BACKLOG)
        listener.set_inheritable(False)
    except OSError as error:
        listener.close()
        foreign = error.errno == errno.EADDRNOTAVAIL
        advice = "--host has to be an address of this machine" if foreign else "choose another with --port"
        reason = error.strerror or str(error)
        raise LoadError(f"cannot listen on {host} port {port} ({reason}): {advice}") from error
    return listener


@contextlib.contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket for the owner and group of this process; its file is removed when the block ends.

    A socket file without a listener, left by a killed server, is replaced. Raises LoadError.
    """
    path = path.absolute()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(_UMASK)  # the file must never be open to other users, even briefly
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        listener.set_inheritable(False)
        inode = path.stat().st_ino
    except OSError as error:
        listener.close()
        raise LoadError(f"cannot listen on --uds {path} ({error.strerror or error}): choose another path") from None
    except LoadError:
        listener.close()
        raise
    try:
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if path.stat().st_ino == inode:  # another server may have replaced the file since
                path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise LoadError(f"--uds {path} exists and is not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LoadError(f"--uds {path} exists and cannot be connected to ({reason_of(error)}): remove it") from None
        else:
            raise LoadError(f"another server listens on --uds {path}: stop it, or choose another path")


def make_tls_context(
    certfile: Path, keyfile: Path | None = None, password: str | None = None, ca_certs: Path | None = None
) -> ssl.SSLContext:
    """TLS 1.2 and later with a certificate and its chain. Raises LoadError that names the option at fault.

    keyfile: None if the key is in `certfile`. ca_certs: clients must present a certificate signed by one of these.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile), ("--ssl-ca-certs", ca_certs)):
        if path is not None and not path.is_file():
            raise LoadError(f"{option} {path} is not a file")
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certfile, keyfile, lambda: password or "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise LoadError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile or certfile} cannot be used ({reason}): give a certificate "
            "in PEM, the key that belongs to it, and WINDLASS_SSL_KEYFILE_PASSWORD if the key has a password"
        ) from None
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise LoadError(
                f"--ssl-ca-certs {ca_certs} cannot be used ({reason_of(error)}): give certificates in PEM"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def use_small_tls_buffers() -> None:
    """Make asyncio read TLS connections in pieces of READ_BYTES, in this process from now on.

    By default it allocates 256 KiB for each connection when it is accepted, even if the client never sends anything.
    """
    sslproto.SSLProtocol.max_size = READ_BYTES
