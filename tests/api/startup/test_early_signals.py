"""Signals while a command is imported, and while a server resolves or downloads its model."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from helpers.eventually import alive, eventually
from helpers.served import Served
from helpers.toy_tokenizers import byte_level

pytestmark = pytest.mark.timeout(240)


@contextmanager
def looking_up(tmp_path: Path, *arguments: str) -> Iterator[Served]:
    """A server that asks an unresponsive hub for its model."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(30)
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        environment["HF_HUB_OFFLINE"] = environment["TRANSFORMERS_OFFLINE"] = "0"
        with Served(Path("some/model"), *arguments, **environment) as served:
            asking, _ = hub.accept()
            with asking:
                yield served


@pytest.mark.slow
def test_sigterm_ends_a_server_that_downloads_its_model(tmp_path: Path) -> None:
    with looking_up(tmp_path) as served:
        engine = served.engine_pid
        served.signal(signal.SIGTERM)
        assert served.wait() == 0  # by its handler: without one it would not end as process 1 of a container
        eventually(lambda: not alive(engine), 30)
        assert not served.errors


@pytest.mark.slow
def test_sighup_does_not_end_a_server_with_named_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "first"\n')
    with looking_up(tmp_path, "--api-key-file", str(keys)) as served:
        served.signal(signal.SIGHUP)
        served.signal(signal.SIGTERM)
        assert served.wait() == 0


@pytest.mark.slow
def test_an_early_sighup_reloads_keys_once_the_server_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "first"\n')
    with Served(tmp_path, "--api-key-file", str(keys)) as served:
        url = served.url  # it listens, and imports the app
        keys.write_text('[alice]\nkey = "second"\n')
        served.signal(signal.SIGHUP)
        served.wait_line("was read again: 1 keys")
        for key, status in (("first", 401), ("second", 200)):
            answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=30.0)
            assert answer.status_code == status


def test_process_1_ends_by_sigterm_while_a_command_is_imported() -> None:
    """Without a handler the kernel discards the signal, and the container waits for its grace period."""
    isolated = ["unshare", "--user", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare and permission for namespaces")
    code = """if True:
        import sys, time, types
        commands = types.ModuleType("windlass.server.cli.main")
        def importing():
            print("importing", flush=True)
            time.sleep(60)
        commands.main = importing
        sys.modules[commands.__name__] = commands
        from windlass.server.cli.entry import main
        main()"""
    with subprocess.Popen([*isolated, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "importing\n"
            (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        finally:
            process.kill()
