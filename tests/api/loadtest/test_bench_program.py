"""`windlass-bench` and `windlass bench` are one command line: the same exit codes, the same one-line errors, light to start."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.scripted_llm import asked, scripted_llm

import windlass
from windlass.clients.loadtest import commands as program
from windlass.server.cli import main as cli


def as_program(*arguments: str) -> int:
    return program.run(arguments)


def as_part_of_the_server(*arguments: str) -> int:
    return cli.run(["bench", *arguments])


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("WINDLASS_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


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
def test_mistakes_read_alike_in_both(arguments, says, capsys):
    lines = []
    for run in (as_program, as_part_of_the_server):
        assert run(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and says in err
        lines.append(err.replace("windlass bench", "windlass-bench"))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("run", [as_program, as_part_of_the_server])
def test_a_run_is_measured_and_written(run, tmp_path, capsys):
    with scripted_llm(asked()) as llm:
        assert run("serve", "--url", llm.url, "--num-prompts", "3", "--json", str(tmp_path / "run.json")) == 0
    assert json.loads((tmp_path / "run.json").read_text())["completed"] == 3
    assert "3 completed, 0 failed" in capsys.readouterr().out


def test_help_and_no_command(capsys):
    assert program.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("windlass-bench", "serve", "report", "compare", "--version"))
    assert program.run([]) == 2
    capsys.readouterr()
    assert program.run(["-V"]) == 0
    assert capsys.readouterr().out == f"windlass-bench {windlass.__version__}\n"


@pytest.mark.parametrize("module", ["windlass.clients.loadtest.commands", "windlass.server.cli.main"])
def test_a_command_starts_without_what_only_its_work_needs(module):
    """The engine's process is started by the server's command: nothing slow may come before that."""
    code = (
        f"import sys, {module};"
        "sys.exit(str([m for m in ('torch', 'fastapi', 'httpx', 'h11', 'numpy', 'jinja2') if m in sys.modules] or ''))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stderr.strip() == ""


@pytest.mark.parametrize("project", ["clients", "."])
def test_ctrl_c_while_a_program_still_imports_is_no_fault_of_it(project):
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
