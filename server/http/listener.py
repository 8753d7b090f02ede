"""Listening sockets: TLS, Unix sockets and the limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
import stat
from asyncio import sslproto
from collections.abc import Iterator
from pathlib import Path

from windlass.engine.errors import LoadError

MAX_OPEN_FILES = 65536  # wanted where the hard limit is higher, or there is none


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most to MOST; returns the one now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than the kernel's own bound, whatever the hard limit says.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


READ_BYTES = 32 * 1024  # two records of TLS


def make_tls_context(
    certfile: Path, keyfile: Path | None = None, password: str | None = None, ca_certs: Path | None = None
) -> ssl.SSLContext:
    """TLS 1.2 and later with this certificate (and its chain); raises LoadError that names the option at fault.

    keyfile: None where the key is in `certfile`. ca_certs: clients must show a certificate that one of these has signed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile), ("--ssl-ca-certs", ca_certs)):
        if path is not None and not path.is_file():
            raise LoadError(f"{option} {path} is no file")
    try:
        # Without a password the library would ask for one on the terminal.
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
            raise LoadError(f"--ssl-ca-certs {ca_certs} cannot be used ({error}): give certificates in PEM") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def use_small_buffers() -> None:
    """Have asyncio read connections under TLS in pieces of READ_BYTES, in this process from now on.

    It would take 256 KiB for each connection when it comes, also for one that never says a word.
    """
    sslproto.SSLProtocol.max_size = READ_BYTES


_UMASK = 0o117  # of the umask: the socket is for its owner and group


@contextlib.contextmanager
def listen_unix(path: Path) -> Iterator[socket.socket]:
    """The socket, which belongs to the owner and the group of this process; its file goes when the block ends.

    A socket that nobody listens on any more, as a server leaves that was killed, is replaced. Raises LoadError.
    """
    path = path.absolute()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(_UMASK)  # the file must not be open to others for a moment either
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(65535)
        listener.set_inheritable(False)
        made = path.stat().st_ino
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
            if path.stat().st_ino == made:  # another server may have taken the path since
                path.unlink()


def _remove_stale(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise LoadError(f"--uds {path} exists and is no socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise LoadError(f"--uds {path} exists and cannot be tried ({error}): remove it") from None
        else:
            raise LoadError(f"another server listens on --uds {path}: end it, or choose another path")
