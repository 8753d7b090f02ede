"""docs/coming-from.md: whatever it calls ours is ours."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from helpers.doc_examples import ROOT
from typer.main import get_command

import windlass
from windlass.engine.rotary.fields import fields_of
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli import main as cli
from windlass.server.protocol.chat import ChatRequest
from windlass.server.protocol.completions import CompletionRequest

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
FIELDS = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)


def rows(heading: str) -> list[tuple[str, str, str]]:
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]  # type: ignore[misc]


SERVERS = ("vLLM", "llama.cpp", "Ollama")
OURS = [(name, theirs, ours) for name in (*SERVERS, "transformers") for theirs, ours, *_ in rows(name)]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def options() -> set[str]:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_every_option_that_is_called_ours_is_one() -> None:
    named = {option for _, _, ours in OURS for part in code(ours) for option in re.findall(r"(?<!\S)(--[\w-]+)", part)}
    assert len(named) > 40
    assert named <= options()
    # So are those in the remarks, and in the sentences between the tables.
    remarks = " ".join(row[2] for name in SERVERS for row in rows(name) if len(row) > 2)
    assert set(re.findall(r"`(--[\w-]+)", remarks)) <= options()


@pytest.mark.parametrize(("name", "theirs", "ours"), OURS, ids=lambda value: value[:40])
def test_every_row_says_what_there_is(name: str, theirs: str, ours: str) -> None:
    assert theirs and ours, name
    for part in code(ours):
        if part.startswith(("--", "windlass ", "http", "POST /v1/", "org/name", "from windlass", "HF_", "WINDLASS_")):
            continue
        word = re.match(r"\w+", part)
        assert word is not None, part
        if name == "transformers":
            known = FIELDS | {"LLM", "llm", "dtype", "quantization", "rope_scaling"}
        else:
            known = FIELDS | set(fields_of("yarn")) | {"system"}
        assert word[0] in known, f"{theirs}: {part}"


def test_scalings_of_the_tables_are_accepted() -> None:
    objects = re.findall(r"`--rope-scaling '(\{[^`]*\})'`", PAGE)
    assert len(objects) >= 3
    for text in objects:
        RopeScaling.from_dict(json.loads(text.replace(": N}", ": 500000}")))


def test_methods_and_keywords_in_python_are_there() -> None:
    methods = {method for _, _, ours in OURS for method in re.findall(r"llm\.(\w+)\(", ours)}
    assert methods >= {"generate", "chat", "stream"}
    assert all(callable(getattr(windlass.LLM, method)) for method in methods)
    (row,) = [ours for _, theirs, ours in OURS if theirs.startswith("`peft.")]
    assert "lora=" in row and "model" in inspect.signature(windlass.LLM).parameters


def test_paths_are_served() -> None:
    http = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    paths = {
        path for _, theirs, ours in OURS for path in re.findall(r"(/\w[\w/-]+)", theirs + ours) if "POST" in theirs
    }
    assert {"/infill", "/tokenize"} <= paths
    for path in paths - {"/completion"}:
        assert f"{path}`" in http or f"`POST {path}" in http, path


def test_environment_variables_are_ours() -> None:
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert "WINDLASS_CACHE" in serving
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    known = {"WINDLASS_CACHE", *(parameter.envvar for parameter in command.params)}
    assert set(re.findall(r"WINDLASS_\w+", PAGE)) <= known
