"""--uds: a server on a Unix socket, whose file is replaced if stale and removed at the end."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import httpx
import pytest
from helpers.served import Served
from helpers.toy_tokenizers import byte_level

from windlass.engine.errors import LoadError
from windlass.server.http.listener import listen_unix


def test_the_socket_file_has_restricted_permissions_and_is_removed(tmp_path):
    path = tmp_path / "socket"
    mask = os.umask(0)
    try:
        with listen_unix(path) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                listener.accept()[0].close()
        assert os.umask(0) == 0  # as it was before
    finally:
        os.umask(mask)
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with listen_unix(path):
        with pytest.raises(LoadError, match="another server listens"), listen_unix(path):
            pass
        assert path.exists()  # the refused server has not removed it
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_unusable_paths(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, said in (
        (tmp_path / "file", "is not a socket"),
        (tmp_path, "is not a socket"),
        (tmp_path / "none" / "socket", "cannot listen on --uds"),
        (tmp_path / ("x" * 200), "cannot listen on --uds"),
    ):
        with pytest.raises(LoadError, match=said), listen_unix(path):
            pass
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_server_on_a_unix_socket(tmp_path):
    model = tmp_path / "toy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    byte_level().save(str(model / "tokenizer.json"))
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    path: Path = tmp_path / "socket"
    with Served(model, "--uds", str(path), "--max-connections-per-address", "1") as served:
        served.wait_line(rf"listening on the Unix socket {path} \(http://localhost/v1\)")
        served.wait_line(r"^windlass \S+ serves")
        served.wait_line(r"^  sampling  temperature 0.5 ")
        clients = [
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=30)
            for _ in "ab"
        ]
        for client in clients:  # it has no addresses to count by
            answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
        for client in clients:
            client.close()
        with Served(model, "--uds", str(path)) as second:
            assert second.wait() == 2 and "another server listens on --uds" in second.errors
        served.signal()
        assert served.wait() == 0 and not path.exists()
