"""HTTPS: responses and streams, unfinished handshakes, unusable files."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.eventually import eventually
from helpers.live_server import Live, live_server

from windlass.engine.errors import LoadError
from windlass.server.http.connection_limits import ConnectionSettings
from windlass.server.http.listener import READ_BYTES, make_tls_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


class Files:
    def __init__(self, directory: Path) -> None:
        self.cert, self.key, self.locked = (directory / name for name in ("cert.pem", "key.pem", "locked.pem"))
        self.other = directory / "other.pem"
        for key, cert in ((self.key, self.cert), (self.other, directory / "other-cert.pem")):
            command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
            command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
            command += ["-addext", "subjectAltName=IP:127.0.0.1"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        command = [
            "openssl",
            "pkey",
            "-in",
            str(self.key),
            "-aes256",
            "-passout",
            "pass:word",
            "-out",
            str(self.locked),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def live(files: Files) -> Iterator[Live]:
    bounds = ConnectionSettings(header_seconds=2.0, max_connections=6, max_per_address=6)
    with live_server(tls=make_tls_context(files.cert, files.key), connections=bounds) as running:
        yield running


def trusting(files: Files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.cert))


def test_responses_and_streams(live: Live, files: Files) -> None:
    with httpx.Client(base_url=live.url, verify=trusting(files), timeout=30) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200
        with client.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        large = client.post("/v1/completions", json={"prompt": "a", "metadata": {"x": "a" * 3_000_000}})
        assert large.status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        httpx.get(f"{live.url}/health", timeout=10)


def test_a_connection_takes_little_memory(live: Live, files: Files) -> None:
    eventually(lambda: len(live.registry) == 0)
    raw = socket.create_connection(("127.0.0.1", httpx.URL(live.url).port))
    with trusting(files).wrap_socket(raw, server_hostname="127.0.0.1") as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        (held,) = live.registry._clients
        protocol = held.transport._transport._ssl_protocol  # type: ignore[attr-defined]
        assert len(protocol._ssl_buffer) == READ_BYTES


@pytest.mark.slow
def test_connections_without_a_handshake_are_counted_and_closed(live: Live, files: Files) -> None:
    eventually(lambda: len(live.registry) == 0)
    port = httpx.URL(live.url).port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    try:
        eventually(lambda: len(live.registry) == 6)
        # All connections are half-open: one of them is evicted for a new one.
        assert httpx.get(f"{live.url}/health", verify=trusting(files), timeout=10).status_code == 200
        begin = time.monotonic()
        for one in silent:
            one.settimeout(10)
            assert one.recv(1) == b""  # closed from the other side
        assert time.monotonic() - begin < 15
        eventually(lambda: len(live.registry) == 0)
    finally:
        for one in silent:
            one.close()
    for said in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100, b"\0" * 4096):
        with socket.create_connection(("127.0.0.1", port)) as wrong:
            wrong.settimeout(10)
            wrong.sendall(said)
            while wrong.recv(4096):  # an alert, perhaps, and the end
                pass
    assert httpx.get(f"{live.url}/health", verify=trusting(files), timeout=10).status_code == 200


def client_hello(files: Files) -> bytes:
    """The first bytes of a client."""
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusting(files).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["nothing", "half a hello", "a hello and no more"])
def test_a_stalled_handshake_is_counted_and_times_out(files: Files, share: float) -> None:
    """Also one that sends a byte now and then: the timeout is that of the first request's head, from the start."""
    bounds = ConnectionSettings(header_seconds=1.0, max_connections=8, max_per_address=3)
    hello = client_hello(files)
    begun = hello[: int(share * len(hello))]
    with live_server(tls=make_tls_context(files.cert, files.key), connections=bounds) as live:
        port = httpx.URL(live.url).port
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        try:
            for one in held:
                one.sendall(begun)
                one.settimeout(20)
            eventually(lambda: len(live.registry) == 3)
            with socket.create_connection(("127.0.0.1", port)) as another:  # the address has reached its limit
                another.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert another.recv(1) == b""
            if 0 < share < 1:
                with contextlib.suppress(OSError):
                    for at in range(len(begun), len(begun) + 8):
                        held[0].sendall(hello[at : at + 1])
                        time.sleep(0.3)
            for one in held:
                with contextlib.suppress(ConnectionResetError):
                    while one.recv(4096):  # the server's part of the handshake, and the end
                        pass
            eventually(lambda: len(live.registry) == 0)
        finally:
            for one in held:
                one.close()
        assert httpx.get(f"{live.url}/health", verify=trusting(files), timeout=10).status_code == 200


def test_client_certificates(files: Files) -> None:
    with live_server(tls=make_tls_context(files.cert, files.key, ca_certs=files.cert)) as live:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{live.url}/health", verify=trusting(files), timeout=10)
        known = trusting(files)
        known.load_cert_chain(files.cert, files.key)
        assert httpx.get(f"{live.url}/health", verify=known, timeout=10).status_code == 200


def test_a_key_with_a_password(files: Files) -> None:
    make_tls_context(files.cert, files.locked, "word")
    for password in (None, "wrong"):
        with pytest.raises(LoadError, match="WINDLASS_SSL_KEYFILE_PASSWORD"):
            make_tls_context(files.cert, files.locked, password)


def test_unusable_files_are_named(files: Files, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_bytes(b"\0nonsense")
    for arguments, named in (
        ((files.cert, files.other), "--ssl-keyfile"),
        ((files.cert, None), "--ssl-keyfile"),
        ((nonsense, files.key), "--ssl-certfile"),
        ((tmp_path / "none.pem", files.key), "--ssl-certfile .* is not a file"),
        ((files.cert, tmp_path), "--ssl-keyfile .* is not a file"),
        ((files.cert, files.key, None, nonsense), "--ssl-ca-certs"),
    ):
        with pytest.raises(LoadError, match=named) as caught:
            make_tls_context(*arguments)
        assert "\n" not in str(caught.value)
