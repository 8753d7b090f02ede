r"""Third-party clients of a real server: structured answers, tool calls, embeddings and rankings.

Skipped without their environments of hundreds of packages:

    python3 -m venv work/outside/python
    work/outside/python/bin/pip install uv
    VIRTUAL_ENV=work/outside/python work/outside/python/bin/uv pip install openai langchain langchain-openai instructor \
        litellm openai-agents 'pydantic-ai-slim[openai]'
    python3 -m venv work/outside/items
    work/outside/items/bin/pip install openai openai-agents anthropic
    python3 -m venv work/outside/llama-index
    work/outside/llama-index/bin/pip install llama-index-llms-openai-like
    npm install --prefix work/outside/node openai ai @ai-sdk/openai-compatible zod
    .venv/bin/pytest -m slow tests/e2e/third_party
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.real_server import RealServer, serve

from windlass.server.startup.model_catalog import SMOLLM2, PullError, pull

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("WINDLASS_OUTSIDE", HERE.parents[2] / "work" / "outside")).absolute()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    try:
        pull(SMOLLM2)
    except PullError as error:
        pytest.skip(str(error))
    with serve("--kv-cache-memory", "512MiB", "--served-model-name", "model", model="smollm2") as running:
        yield running


def run_checks(command: list[str], folder: Path, checks: int) -> None:
    """Run a script, whose checks must pass. checks: their number."""
    # Some clients refuse to start without a key of OpenAI.
    environment = {**os.environ, "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1000)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join([*lines, done.stderr[-2000:]])
    assert len([line for line in lines if line.startswith("ok ")]) == checks


@pytest.mark.parametrize(
    ("environment", "names", "checks"),
    [
        ("python", ["openai", "langchain", "instructor", "litellm", "pydantic_ai"], 14),
        ("llama-index", ["llama_index"], 2),
        ("items", ["items"], 3),
    ],
)
def test_python_clients_pass(request: pytest.FixtureRequest, environment: str, names: list[str], checks: int) -> None:
    python = CLIENTS / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no Python clients in {python.parent}")
    server: RealServer = request.getfixturevalue("server")
    run_checks(
        [str(python), str(HERE / "python_clients.py"), f"{server.url}/v1", "model", *names], python.parent, checks
    )


def test_retrieval_clients_pass() -> None:
    python = CLIENTS / "retrieval" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no clients for retrieval in {python.parent}")
    with serve("--served-model-name", "model", model="demo") as running:
        run_checks([str(python), str(HERE / "retrieval_clients.py"), running.url, "model", ""], python.parent, 7)


def test_javascript_clients_pass(request: pytest.FixtureRequest) -> None:
    folder, node = CLIENTS / "node", shutil.which("node")
    if node is None or not (folder / "node_modules").is_dir():
        pytest.skip(f"no node, or no packages in {folder}")
    server: RealServer = request.getfixturevalue("server")
    run_checks([node, str(HERE / "javascript_clients.mjs"), f"{server.url}/v1", "model"], folder, 8)
