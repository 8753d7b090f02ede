"""The systemd unit: systemd accepts it, and its command, exit code and time to stop agree with the server."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from windlass.server.config.server_options import OPTIONS, ServerOptions

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy" / "systemd" / "windlass.service"
PAGE = (ROOT / "docs" / "guides" / "deployment.md").read_text(encoding="utf-8")


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    program = service()["ExecStart"].split()[0]
    copy = tmp_path / UNIT.name
    for executable, accepted in ((sys.executable, True), (str(tmp_path / "missing"), False)):
        copy.write_text(text.replace(program, executable), encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
        assert (done.returncode == 0 and not done.stderr) == accepted, done.stderr


def test_unit_agrees_with_the_server() -> None:
    unit = service()
    assert unit["ExecStart"].split()[1:] == ["serve", "--config", "/etc/windlass/windlass.yaml"]
    assert unit["RestartPreventExitStatus"] == "2"  # refused options and models
    assert float(unit["TimeoutStopSec"]) > ServerOptions().grace_period + 2
    assert unit["KillMode"] == "mixed"  # SIGTERM to the engine would fail the requests in progress


def test_configuration_of_the_page_has_known_keys() -> None:
    section = PAGE[PAGE.index("\n## systemd\n") :]
    config = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)[0])
    assert {key.replace("-", "_") for key in config} <= set(OPTIONS) | {"model"}
    assert "/etc/windlass/windlass.yaml" in UNIT.read_text(encoding="utf-8")
    assert "deploy/systemd/windlass.service" in section


def test_the_user_of_the_service_can_read_the_installation() -> None:
    """Under the umask of a careful shell, systemd could not execute the program (203/EXEC)."""
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    installing = next(at for at, line in enumerate(commands) if "/opt/windlass" in line)
    masks = [line.split()[1] for line in commands[:installing] if line.startswith("umask ")]
    assert masks[-1:] == ["022"]
