"""A real server that is started again on the folder of the one before."""

import os
import signal
from pathlib import Path

import httpx
import pytest
from helpers.eventually import alive, eventually
from helpers.real_server import RealServer, serve

TEXT = " ".join(f"The {number}th lamp in the harbour was lit at dusk by the keeper." for number in range(22))


def ask(server: RealServer, **fields: object) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 12, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_prefix_outlives_servers_however_they_end(dtype: str, tmp_path: Path) -> None:
    options = ("--kv-persist", str(tmp_path / "kept"), "--kv-cache-memory", "64MiB", "--deterministic")
    options += ("--kv-cache-dtype", dtype)
    with serve(*options[2:]) as server:
        right, _ = ask(server)
        assert server.metric("windlass_kv_persist_written_blocks_total") == 0
    with serve(*options) as server:
        assert ask(server) == (right, 0)
        assert ask(server, cache_salt="mine") == (right, 0)
    with serve(*options) as server:  # ended in order: all was written
        text, cached = ask(server)
        assert text == right and cached > 200 and cached % 16 == 0
        assert ask(server, cache_salt="mine") == (right, cached)
        assert ask(server, cache_salt="yours") == (right, 0)
        assert ask(server, rope_scaling={"rope_type": "linear", "factor": 2})[1] == 0
        assert server.metric("windlass_kv_persist_restored_tokens_total") == 2 * cached
        assert server.metric("windlass_kv_persist_read_blocks_total") == 2 * cached / 16
        assert server.metric("windlass_kv_persist_disk_bytes") > 0
        eventually(lambda: server.metric("windlass_kv_persist_waiting_blocks") == 0, 30)
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        eventually(lambda: not alive(engine), 30)
    with serve(*options) as server:
        assert ask(server) == (right, cached)


@pytest.mark.slow
def test_an_engine_that_is_killed_finds_its_prefixes_again(tmp_path: Path) -> None:
    with serve("--kv-persist", str(tmp_path), "--kv-cache-memory", "64MiB", "--deterministic") as server:
        right, _ = ask(server)
        eventually(lambda: server.metric("windlass_kv_persist_waiting_blocks") == 0, 30)
        eventually(lambda: server.metric("windlass_kv_persist_written_blocks_total") > 12, 30)
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: server.metric("windlass_engine_restarts_total") == 1, 60)
        server.wait_ready()
        text, cached = ask(server)
        assert text == right and cached > 200
