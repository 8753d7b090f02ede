"""TLS for a listener, from files. Knows the ssl module; knows nothing of connections."""

from __future__ import annotations

import ssl
from asyncio import sslproto
from pathlib import Path

from windlass.engine.errors import LoadError

READ_BYTES = 32 * 1024  # two records of TLS


def make_context(
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
            "in PEM, the key that belongs to it, and --ssl-keyfile-password where the key has one"
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
