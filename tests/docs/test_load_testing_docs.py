"""docs/load-testing.md: its options are the command's, its defaults the code's, its kinds all there are; its example runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.scripted_http import full_stream, scripted_llm
from typer.main import get_command

from windlass.clients.loadtest import options, runner, timed_requests
from windlass.clients.loadtest.load_plan import read_trace
from windlass.clients.loadtest.results import ABANDONED, RunResult
from windlass.server.cli import main as cli

PAGE = (Path(__file__).parents[2] / "docs" / "load-testing.md").read_text(encoding="utf-8")
COMMAND = get_command(cli.app).commands["bench"].commands["serve"]  # type: ignore[attr-defined]
OPTIONS = {name: p for p in COMMAND.params for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}


def test_every_option_is_on_the_page():
    named = set(re.findall(r"(--[a-z][\w-]*)", PAGE))
    assert not set(OPTIONS) - {"--help", "--usage"} - named
    assert len(OPTIONS) > 40


def test_every_option_in_the_commands_is_one():
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in joined(block)]
    assert len(commands) >= 7
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["windlass", "bench", "serve"]
        context = COMMAND.make_context("serve", words[3:])  # raises where an option or its value is none
        assert context.params["url"] == "http://127.0.0.1:8000"


def joined(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("option", "shown"),
    [("--timeout", "600"), ("--sweep-share", "0.99"), ("--sweep-runs", "12"), ("--temperature", "0")],
)
def test_defaults_on_the_page_are_the_code_s(option, shown):
    assert OPTIONS[option].default == float(shown)
    assert re.search(rf"{option}[^.]*?\b{re.escape(shown)}\b", PAGE)


def test_limits_on_the_page_are_the_code_s():
    assert f"default {options.DEFAULT_PROMPTS}" in PAGE
    assert f"more than {runner.BUSY_LIMIT:.0%}".replace("%", " %") in PAGE.replace("\n", " ")
    assert f"than {runner.LAG_LIMIT_MS:g} ms late" in PAGE.replace("\n", " ")
    assert f"{runner._PREPARED_REQUESTS:,} requests" in PAGE and f"{runner._PREPARED_BYTES >> 20} MiB" in PAGE
    assert timed_requests.MAX_IDLE_SECONDS == 1.0 and "idle for less than a second" in PAGE


def test_every_figure_and_every_kind_is_on_the_page():
    code = set(re.findall(r"`(\w+)`", PAGE))
    summary = RunResult(records=(), duration_s=0.0).summary()
    counted = {"completed", "failed", "input_tokens", "output_tokens"}
    assert not set(summary) - counted - code
    assert not ABANDONED - code
    folder = Path(timed_requests.__file__).parent
    sources = [(folder / name).read_text() for name in ("timed_requests.py",)]
    kinds = {kind for text in sources for kind in re.findall(r'(?:\.end|_fail)\(\s*"(\w+)"', text)}
    assert kinds >= {"truncated", "malformed", "error_event", "timeout", "connection", "aborted"}
    assert not kinds - {"completed"} - code


def test_the_trace_on_the_page_is_one(tmp_path):
    (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "trace.jsonl"
    path.write_text(example)
    assert [entry.max_tokens for entry in read_trace(path)] == [60, 20, 20]


def test_the_python_example_runs(capsys):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with scripted_llm(full_stream) as llm:
        exec(
            compile(source.replace("http://127.0.0.1:8000", llm.url), "load-testing.md", "exec"),
            {"__name__": "__main__"},
        )
    assert len(llm.generations) == 10
    assert json.loads(json.dumps(llm.bodies[0]))["max_tokens"] == 16
    assert len(capsys.readouterr().out.splitlines()) == 11
