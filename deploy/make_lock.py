"""Write requirements.lock: one version of every library that a server needs, with the sha256 of its files.

`make lock` runs it with uv. The distributions of this repository are not included.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
EXTRAS = ("hub", "otel")
HEAD = """\
# Made by `make lock`; do not edit. pip install --require-hashes -r requirements.lock, then pip install --no-deps . ./clients
# torch is the build of PyPI, with the CUDA libraries on Linux. The CPU build has other hashes: see CONTRIBUTING.md.
"""


def wanted() -> list[str]:
    """Run-time requirements of both distributions and of the extras."""
    server = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    client = tomllib.loads((ROOT / "clients" / "pyproject.toml").read_text(encoding="utf-8"))
    found = [*server["tool"]["windlass"]["dependencies"], *client["project"]["dependencies"]]
    for extra in EXTRAS:
        found += server["project"]["optional-dependencies"][extra]
    return sorted(set(found))


def main(uv: str) -> int:
    """Resolve for all supported platforms and Python versions, and write the file. uv: the program."""
    command = [uv, "pip", "compile", "-", "--generate-hashes", "--universal", "--python-version", "3.11", "--no-header",
               "--no-annotate", "--constraint", str(ROOT / "constraints.txt"), "--quiet"]  # fmt: skip
    done = subprocess.run(command, input="\n".join(wanted()), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        LOCK.write_text(HEAD + done.stdout, encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
