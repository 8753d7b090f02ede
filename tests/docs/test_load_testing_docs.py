"""Commands, trace and Python example of docs/load-testing.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from helpers.scripted_http import full_stream, scripted_llm
from typer.main import get_command

from windlass.clients.loadtest.load_plan import read_trace
from windlass.server.cli import main as cli

PAGE = (Path(__file__).parents[2] / "docs" / "load-testing.md").read_text(encoding="utf-8")
COMMAND = get_command(cli.app).commands["bench"].commands["serve"]  # type: ignore[attr-defined]


def test_commands_are_accepted():
    commands = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in joined(block)]
    assert len(commands) >= 7
    for command in commands:
        words = shlex.split(command)
        assert words[:3] == ["windlass", "bench", "serve"]
        context = COMMAND.make_context("serve", words[3:])  # raises for a wrong option or value
        assert context.params["url"] == "http://127.0.0.1:8000"


def joined(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_trace_can_be_read(tmp_path):
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
