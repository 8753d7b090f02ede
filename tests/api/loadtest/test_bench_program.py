"""`windlass-bench` and `windlass bench`: equal exit codes and error lines, and a light start."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.scripted_http import full_stream, scripted_llm

import windlass
from windlass.clients.loadtest import commands
from windlass.server.cli import main as cli

pytestmark = pytest.mark.usefixtures("clean_environment")


def as_program(*arguments: str) -> int:
    return commands.run(arguments)


def as_part_of_the_server(*arguments: str) -> int:
    return cli.run(["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve"], "--url"),
        (["serve", "--url", "http://127.0.0.1:9", "--num-prompt", "1"], "--num-prompts"),
        (["serv"], "No such command"),
        (["serve", "--url", "http://127.0.0.1:9", "--endpoint", "chats"], "--endpoint must be completions or chat"),
        (["serve", "--url", "http://127.0.0.1:9", "--json", "/none/x.json"], "not a directory"),
        (["serve", "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["report", "none.json", "--html", "x.html"], "cannot read none.json"),
        (["compare", "a.json", "b.json", "--confidence", "2"], "--confidence must be"),
    ],
)
def test_both_programs_report_equal_errors(arguments, says, capsys):
    lines = []
    for run in (as_program, as_part_of_the_server):
        assert run(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
        lines.append(err.replace("windlass bench", "windlass-bench"))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("run", [as_program, as_part_of_the_server])
def test_both_programs_measure_and_write(run, tmp_path, capsys):
    with scripted_llm(full_stream) as llm:
        assert run("serve", "--url", llm.url, "--num-prompts", "3", "--json", str(tmp_path / "run.json")) == 0
    assert json.loads((tmp_path / "run.json").read_text())["completed"] == 3
    assert "3 completed, 0 failed" in capsys.readouterr().out


def test_help_and_no_command(capsys):
    assert commands.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("windlass-bench", "serve", "report", "compare", "--version"))
    assert commands.run([]) == 2
    capsys.readouterr()
    assert commands.run(["-V"]) == 0
    assert capsys.readouterr().out == f"windlass-bench {windlass.__version__}\n"


@pytest.mark.parametrize("module", ["windlass.clients.loadtest.commands", "windlass.server.cli.main"])
def test_commands_start_without_heavy_imports(module):
    """Slow imports would delay the engine process, which the server's command starts."""
    code = (
        f"import sys, {module};"
        "sys.exit(str([m for m in ('torch', 'fastapi', 'httpx', 'h11', 'numpy', 'jinja2') if m in sys.modules] or ''))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stderr.strip() == ""


@pytest.mark.parametrize("project", ["clients", "."])
def test_ctrl_c_during_imports_exits_silently(project):
    settings = tomllib.loads((Path(__file__).parents[3] / project / "pyproject.toml").read_text(encoding="utf-8"))
    ((_, target),) = settings["project"]["scripts"].items()
    module, _, name = target.partition(":")
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\n"
        f"from {module} import {name}\n"
        f"{name}()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
