"""Every route of a real server with the bundled model, asked for what nobody should ask: the corpus of what broke others, damaged
bodies, unlikely paths and methods, and what Schemathesis makes of the API's description.

None may answer 500, hang, take down the engine or disturb the streams beside. The long form prints counts by route and status.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from e2e_helpers.advisories import CORPUS
from e2e_helpers.fuzzing import KEY, Found, fuzz
from helpers.real_server import RealServer, serve

SEED = 20261124
OPTIONS = (
    "--api-key",
    KEY,
    "--max-num-seqs",
    "8",
    "--default-max-tokens",
    "8",
    "--request-timeout",
    "4",
    "--attention-maps",
)
MORE = 300
CASES = int(os.environ.get("FUZZ_CASES", "40000"))
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "350")  # of Schemathesis, for each operation and phase
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "504"]\n'


def assert_unharmed(server: RealServer, found: Found, engine: int) -> None:
    assert not found.wrong, f"{len(found.wrong)} answers are wrong:\n" + "\n".join(found.wrong[:10])
    assert server.process.poll() is None and server.engine_pid() == engine
    log = server.log.read_text()
    assert "Traceback" not in log, log[-3000:]
    body = {"prompt": "Once", "max_tokens": 2, "temperature": 0}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert answer.status_code == 200


def summary(found: Found) -> str:
    gaps = ", ".join(f"p{100 * share:g} {found.quantile(share):.3f} s" for share in (0.5, 0.99, 0.999, 1.0))
    head = (
        f"{found.total} cases, slowest {found.slowest:.2f} s, {dict(found.codes)}; {found.streams} streams, gaps {gaps}"
    )
    return f"{head}; paused for {found.paused:.0f} s\n{found.table()}"


def test_the_corpus_and_some_damaged_requests(tmp_path: Path) -> None:
    with serve(*OPTIONS) as server:
        engine = server.engine_pid()
        found = fuzz(server.url, SEED, len(CORPUS) + MORE, streams=1)
        print(summary(found))
        assert_unharmed(server, found, engine)
    statuses = {status for _, status in found.counts}
    assert statuses >= {200, 400, 401, 404, 405}, statuses
    assert found.total == len(CORPUS) + MORE and found.streams > 0


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_fifty_thousand_requests(tmp_path: Path) -> None:
    with serve(*OPTIONS) as server:
        engine = server.engine_pid()
        found = fuzz(server.url, SEED + 1, CASES)
        print(summary(found))
        assert_unharmed(server, found, engine)
        generated = schemathesis(server, tmp_path)
        print(f"Schemathesis: {generated} cases")
        assert_unharmed(server, found, engine)
        assert found.total + generated >= 50_000 or "FUZZ_CASES" in os.environ
        assert server.process.poll() is None


def schemathesis(server: RealServer, folder: Path) -> int:
    """Cases that it made, none of which found anything."""
    from importlib.util import find_spec
    from shutil import which
    from sys import executable

    command = which("st", path=os.pathsep.join((str(Path(executable).parent), os.environ.get("PATH", ""))))
    assert command and find_spec("schemathesis")
    (folder / "schemathesis.toml").write_text(CONFIG)
    arguments = [
        "run",
        f"{server.url}/openapi.json",
        "--header",
        f"Authorization: Bearer {KEY}",
        "--max-examples",
        EXAMPLES,
    ]
    arguments += ["--checks", "not_a_server_error,status_code_conformance,response_schema_conformance", "--seed", "1"]
    arguments += ["--continue-on-failure", "--no-color", "--no-shrink", "--suppress-health-check", "all"]
    run = subprocess.run([command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-20000:]
    match = re.search(r"(\d+) generated", run.stdout)
    assert match, run.stdout[-3000:]
    return int(match[1])
