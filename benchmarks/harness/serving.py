"""Starts `windlass serve`, waits until it takes requests, works it a little, and reads how much memory it ever held."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import abc
from pathlib import Path

from harness.machine import descendants, peak_memory
from harness.worker import WorkerError

SERVE = "import sys; from windlass.server.cli.main import main; sys.exit(main())"


def time_to_ready(
    model: Path, options: list[str], log: Path, environment: dict[str, str], limit: float = 600.0
) -> tuple[float, int]:
    """(seconds from the command to a 200 from /ready, peak bytes of all its processes after some work).

    The work: eight requests at once with prompts of 512 random tokens and 16 tokens of output.
    Raises WorkerError when the server ends or is not ready within `limit` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("ab") as out:
        started = time.perf_counter()
        server = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        while _status(port, "/ready") != 200:
            if server.poll() is not None:
                raise WorkerError(f"windlass serve exited with {server.returncode}: see {log}")
            if time.perf_counter() - started > limit:
                raise WorkerError(f"windlass serve was not ready within {limit:.0f} s: see {log}")
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(lambda seed: _complete(port, seed), range(8)))
        if set(statuses) != {200}:
            raise WorkerError(f"the server answered {statuses}: see {log}")
        return seconds, peak_memory([server.pid, *descendants(server.pid)])
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextlib.contextmanager
def serving(
    model: Path, options: list[str], log: Path, environment: dict[str, str], limit: float = 600.0
) -> abc.Iterator[str]:
    """The address of a `windlass serve` that takes requests, for as long as the block runs.

    Raises WorkerError when the server ends or is not ready within `limit` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("ab") as out:
        # A session of its own: ctrl-C reaches this script only, which then ends the server.
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
        )
    started = time.monotonic()
    try:
        while _status(port, "/ready") != 200:
            if server.poll() is not None:
                raise WorkerError(f"windlass serve exited with {server.returncode}: see {log}")
            if time.monotonic() - started > limit:
                raise WorkerError(f"windlass serve was not ready within {limit:.0f} s: see {log}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def _complete(port: int, seed: int) -> int:
    prompt = [random.Random(seed).randrange(300, 1000) for _ in range(512)]
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"a request failed: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
