"""The description, tried by Schemathesis against a real server with the bundled model: what it says, and no 500.

It makes requests of the schemas, right and wrong ones, follows links between operations, and compares what comes back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.real_server import serve

KEY = "k"
SECONDS = 150
CHECKS = """
not_a_server_error status_code_conformance content_type_conformance response_headers_conformance response_schema_conformance
unsupported_method allow_header_conformance use_after_free ensure_resource_availability ignored_auth
"""
# A request may ask for a deadline that nothing can meet.
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "504"]\n'


def tool() -> str:
    """Schemathesis' command."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return shutil.which("st", path=path) or pytest.skip("needs the extra e2e: pip install -e '.[e2e]'")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 150)
def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    command = tool()
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    options = ("--api-key", KEY, "--max-num-seqs", "8", "--default-max-tokens", "16", "--request-timeout", "20")
    with serve(*options) as server:
        server.wait_ready()
        arguments = [
            *("run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}"),
            *("--checks", ",".join(CHECKS.split()), "--max-examples", "15", "--max-time", str(SECONDS)),
            *("--seed", "1", "--continue-on-failure", "--no-color", "--no-shrink", "--suppress-health-check", "all"),
        ]
        run = subprocess.run([command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "Tested: " in run.stdout, run.stdout + run.stderr
        assert run.returncode == 0, run.stdout[-20000:]
        assert "Traceback" not in server.log.read_text()
