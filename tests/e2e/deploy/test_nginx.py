"""The nginx example: nginx accepts it, and streams pass without buffering."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.eventually import eventually
from helpers.ray_cluster import free_port
from helpers.real_server import serve

CONFIG = Path(__file__).parents[3] / "deploy" / "nginx" / "windlass.conf"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(tmp_path / "windlass.key"), "-out", str(tmp_path / "windlass.crt")]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "windlass.crt"


def configured(folder: Path, port: int, upstream: str) -> Path:
    """The example with other paths and addresses."""
    text = CONFIG.read_text(encoding="utf-8")
    for before, after in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/windlass", str(folder / "windlass")),
        ("server 127.0.0.1:8000 ", f"server {upstream} "),
    ):
        assert before in text
        text = text.replace(before, after)
    whole = folder / "nginx.conf"
    temporary = " ".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; {temporary}\n{text}\n}}\n"
    )
    return whole


@contextmanager
def nginx(folder: Path, port: int, upstream: str) -> Iterator[None]:
    assert NGINX is not None
    config = configured(folder, port, upstream)
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def test_nginx_accepts_the_configuration(certificate: Path) -> None:
    assert NGINX is not None
    config = configured(certificate.parent, free_port(), "127.0.0.1:8000")
    done = subprocess.run(
        [NGINX, "-t", "-p", str(certificate.parent), "-c", str(config)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "warn" not in done.stderr, done.stderr


@pytest.mark.slow
def test_streams_pass_without_buffering(certificate: Path) -> None:
    port, trusted = free_port(), ssl.create_default_context(cafile=str(certificate))
    body = {"model": "demo", "prompt": "The sun", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        serve("--kv-cache-memory", "32MiB", "--burst-ms", "0") as server,
        nginx(certificate.parent, port, server.url.removeprefix("http://")),
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=30) as client,
    ):

        def up() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        eventually(up, 10)
        assert client.get("/metrics").status_code == 403
        with client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = [piece for piece in answer.iter_raw() if piece]
        assert answer.status_code == 200 and pieces[-1].endswith(b"data: [DONE]\n\n")
        assert len(pieces) > 20  # they came as they were made, and not all at the end
