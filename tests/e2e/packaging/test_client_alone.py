"""windlass-client in an environment without server and torch: the client and the load tester work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_helpers.builds import ROOT, build, copy_clone
from helpers.real_server import RealServer, serve

pytestmark = pytest.mark.slow  # installs into a new environment

LARGEST_MB = 200


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the client's wheel and its requirements."""
    folder = tmp_path_factory.mktemp("alone")
    wheel = build(copy_clone(folder / "clone") / "clients", "wheel", folder / "wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "env" / "bin" / "python"),
        "install",
        "--retries",
        "1",
    ]
    command += ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    installed = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    if installed.returncode != 0 and "after connection broken by" in installed.stderr:
        pytest.skip("no package index can be reached from here")
    assert installed.returncode == 0, installed.stderr
    return folder / "env" / "bin"


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--kv-cache-memory", "64MiB") as running:
        yield running


def environment() -> dict[str, str]:
    """The environment without this checkout and without settings of Windlass."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith(("WINDLASS_", "OPENAI_"))}


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, whose packages would be found first."""
    arguments = [str(word) for word in command]
    return subprocess.run(arguments, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def test_the_environment_is_small_and_has_no_server(alone: Path, tmp_path: Path) -> None:
    code = """
import importlib.util, json, windlass, windlass.clients
heavy = ("torch", "fastapi", "uvicorn", "tokenizers", "safetensors")
heavy += ("windlass.server", "windlass.engine", "windlass.kernels", "windlass.lab")
print(json.dumps([windlass.__file__, [name for name in heavy if importlib.util.find_spec(name)]]))
"""
    result = run(alone / "python", "-c", code, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [None, []]  # a namespace has no file
    size = sum(path.stat().st_size for path in alone.parent.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < LARGEST_MB * 1_000_000


def test_the_client_works_alone(alone: Path, server: RealServer, tmp_path: Path) -> None:
    code = """
import asyncio, sys
from windlass.clients import AsyncClient, BadRequestError, Client, RopeScaling

url = sys.argv[1]
with Client(base_url=url) as client:
    answer = client.completions("The king", max_tokens=8, temperature=0, rope_scaling=RopeScaling.yarn(factor=2))
    assert answer.usage.completion_tokens == 8 and answer.rotary.rope_type == "yarn"
    with client.completions("The king", max_tokens=8, temperature=0, stream=True) as stream:
        text = "".join(chunk.text for chunk in stream)
    try:
        client.completions("The king", temperature=-1)
    except BadRequestError as error:
        assert error.param == "temperature"
    assert client.metrics().value("windlass_request_success_total") >= 2

async def complete():
    async with AsyncClient(base_url=url) as client:
        return (await client.completions("The king", max_tokens=8, temperature=0)).text

assert asyncio.run(complete()) == text != ""
"""
    result = run(alone / "python", "-c", code, server.url, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_load_tester_works_alone(alone: Path, server: RealServer, tmp_path: Path) -> None:
    program = alone / "windlass-bench"
    load = ["--url", server.url, "--input-len", 16, "--output-len", 4, "--num-prompts", 40, "--concurrency", 4]
    for name in ("a", "b"):
        result = run(program, "serve", *load, "--json", f"{name}.json", "--html", f"{name}.html", folder=tmp_path)
        assert result.returncode == 0 and "40 completed, 0 failed" in result.stdout, result.stderr
        assert (tmp_path / f"{name}.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    compared = run(program, "compare", "a.json", "b.json", folder=tmp_path)
    assert compared.returncode == 0 and "B is" in compared.stdout, compared.stderr
    assert run(program, "report", "a.json", "b.json", "--html", "both.html", folder=tmp_path).returncode == 0
    wrong = run(program, "serve", "--url", server.url, "--num-prompt", 3, folder=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "--num-prompts" in wrong.stderr
