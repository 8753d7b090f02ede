"""docs/start/coming-from.md: its options, scalings and methods exist, and every option of another server has a hint."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from types import SimpleNamespace

from helpers.doc_examples import ROOT
from typer.main import get_command

import windlass
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.cli import main as cli
from windlass.server.config import migration_hints
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.completions import CompletionRequest

PAGE = (ROOT / "docs" / "start" / "coming-from.md").read_text(encoding="utf-8")
FIELDS = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)


def rows(heading: str) -> list[tuple[str, str, str]]:
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]  # type: ignore[misc]


SERVERS = ("vLLM", "llama.cpp", "Ollama")
OURS = [(name, theirs, ours) for name in (*SERVERS, "transformers") for theirs, ours, *_ in rows(name)]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def options() -> frozenset[str]:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    shown = [parameter for parameter in command.params if not parameter.hidden]
    return frozenset(name for parameter in shown for name in (*parameter.opts, *parameter.secondary_opts))


def test_options_of_windlass_exist() -> None:
    named = {option for _, _, ours in OURS for part in code(ours) for option in re.findall(r"(?<!\S)(--[\w-]+)", part)}
    assert len(named) > 40
    assert named <= options()
    remarks = " ".join(row[2] for name in SERVERS for row in rows(name) if len(row) > 2)
    assert set(re.findall(r"`(--[\w-]+)", remarks)) <= options()


def test_scalings_are_accepted() -> None:
    objects = re.findall(r"`--rope-scaling '(\{[^`]*\})'`", PAGE)
    assert len(objects) >= 3
    for text in objects:
        RopeScaling.from_dict(json.loads(text.replace(": N}", ": 500000}")))


def test_methods_and_keywords_in_python_exist() -> None:
    methods = {method for _, _, ours in OURS for method in re.findall(r"llm\.(\w+)\(", ours)}
    assert methods >= {"generate", "chat", "stream"}
    assert all(callable(getattr(windlass.LLM, method)) for method in methods)
    (row,) = [ours for _, theirs, ours in OURS if theirs.startswith("`peft.")]
    assert "lora=" in row and "model" in inspect.signature(windlass.LLM).parameters


def test_every_option_of_another_server_has_a_hint_that_names_existing_options() -> None:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    foreign = {
        option
        for row in rows("vLLM") + rows("llama.cpp")
        for part in code(row[0])
        for option in re.findall(r"(?<!\S)--?[a-z][\w-]*+(?!…)", part)
        if not option.startswith("-h")
    } - options()
    assert len(foreign) > 100
    for option in foreign - {"--model"}:  # an argument of `serve`
        hint = migration_hints.foreign_option_hint(SimpleNamespace(command=command), option)
        assert hint is not None, option
        assert set(re.findall(r"--[a-z][a-z-]*", hint)) <= options() - {option}, (option, hint)
        if hint.startswith("here it is a field"):
            assert hint.partition(";")[0].split()[-1] in FIELDS, option
