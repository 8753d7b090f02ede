"""Commands, trace and Python example of docs/guides/load-testing.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from helpers.scripted_http import full_stream, scripted_llm
from typer.main import get_command

from windlass.clients.loadtest.load_plan import read_trace
from windlass.server.cli import main as cli

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "load-testing.md").read_text(encoding="utf-8")
BENCH = get_command(cli.app).commands["bench"]  # type: ignore[attr-defined]


def test_commands_are_accepted():
    """Every `windlass bench` command with arguments; `$n`, `$port` and `$length` are variables of loops."""
    names = []
    in_text = re.findall(r"`(windlass bench \w+ [^`…]+)`", PAGE)
    for block in [*re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL), *in_text]:
        for line in block.replace("\\\n", " ").splitlines():
            if not line.strip().startswith("windlass bench "):
                continue
            line = re.sub(r"\$(n|length)", "1", line.replace("$port", "8000"))
            words = shlex.split(line, comments=True)
            name = words[2]
            context = BENCH.commands[name].make_context(name, words[3:])  # raises for a wrong option or value
            if name == "serve":
                assert re.fullmatch(r"http://127\.0\.0\.1:800[01]", context.params["url"])
            names.append(name)
    assert names.count("serve") >= 10 and names.count("report") >= 2 and names.count("compare") >= 2


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
