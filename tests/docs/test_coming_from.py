"""docs/coming-from.md: whatever it calls ours is ours."""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from types import SimpleNamespace

import pytest
from helpers.doc_examples import ROOT
from typer.main import get_command

import windlass
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.scaling_fields import fields_of
from windlass.server.cli import main as cli
from windlass.server.config import migration_hints
from windlass.server.schemas.chat import ChatRequest
from windlass.server.schemas.completions import CompletionRequest

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


@cache
def options() -> frozenset[str]:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    shown = [parameter for parameter in command.params if not parameter.hidden]
    return frozenset(name for parameter in shown for name in (*parameter.opts, *parameter.secondary_opts))


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


def theirs_to_ours() -> dict[str, str]:
    """Options of other servers that are none of ours, as the page has them, and what it says of each: ours and the remark."""
    found: dict[str, str] = {}
    for row in rows("vLLM") + rows("llama.cpp"):
        for option in (option for part in code(row[0]) for option in re.findall(r"(?<!\S)--?[a-z][\w-]*+(?!…)", part)):
            found[option] = " | ".join([found.get(option, ""), *row[1:]])
    return {option: said for option, said in found.items() if option not in options() and not option.startswith("-h")}


def test_a_command_says_of_their_options_what_the_page_says() -> None:
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    page = theirs_to_ours()
    assert len(page) > 100
    for option, said in page.items():
        if option == "--model":
            continue  # it is an argument here
        foreign_option_hint = migration_hints.foreign_option_hint(SimpleNamespace(command=command), option)
        assert foreign_option_hint is not None, option
        named = set(re.findall(r"--[a-z][a-z-]*", foreign_option_hint))
        assert named <= options() - {option}, (option, foreign_option_hint)
        if foreign_option_hint.startswith("here it is a field"):
            assert foreign_option_hint.partition(";")[0].split()[-1] in FIELDS, option
            assert ("--override-generation-config" in said) <= (
                "--override-generation-config" in foreign_option_hint
            ), option
        elif "leave it out" not in foreign_option_hint:
            words = named or set(re.findall(r"[\w/@-]+", foreign_option_hint)[-2:])
            assert words & set(re.findall(r"[\w/@-]+", said)), (option, foreign_option_hint)
    tables = (
        migration_hints._RENAMED_OPTIONS,
        migration_hints._REQUEST_FIELDS,
        migration_hints._ALTERNATIVES,
        migration_hints._UNNEEDED_OPTIONS,
    )
    assert {option for table in tables for names in table for option in names.split()} - {"-m", "--seed"} <= set(page)


@pytest.mark.parametrize(
    ("command", "option", "said"),
    [
        ("serve", "--enable-prefix-caching", "here it is --prefix-caching, on by default"),
        ("serve", "--ctx-size", "here it is --max-model-len"),
        ("serve", "-ngl", "a model is on one device: leave it out"),
        ("serve", "-np", "here it is --max-num-seqs"),
        (
            "serve",
            "--temp",
            "here it is a field of a request, temperature; --override-generation-config sets it for those without",
        ),
        ("serve", "--seed", "here it is a field of a request, seed"),
        ("generate", "--temp", "here it is --temperature"),
        ("serve", "-m", "name the model without an option, as in windlass serve MODEL"),
        ("generate", "-m", "here it is --model"),
        ("serve", "--model", "give it without an option, as MODEL"),
        ("top", "--url", "give it without an option, as URL"),
        # by their spelling
        ("serve", "--prot", "did you mean --port?"),
        ("serve", "--disable-prefix-caching", "did you mean --no-prefix-caching?"),
        ("serve", "--enable-ui", "did you mean --ui?"),
        ("serve", "--cuda-graphs", "set the environment variable WINDLASS_CUDA_GRAPHS"),
        (
            "serve",
            "--pin-cores",
            "it is a configuration key: write pin-cores in --config FILE, or set WINDLASS_PIN_CORES",
        ),
        ("generate", "--block-size", "it is a configuration key: set WINDLASS_BLOCK_SIZE"),
        # nothing is near, or would be the opposite
        ("serve", "--ctx-len", ""),
        ("generate", "--alias", ""),
        ("serve", "--no-kv-persist", ""),
    ],
)
def test_an_option_that_is_not_there(command: str, option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, option, "5"]) == 2
    expected = f"error: No such option: {option}{said and ': '}{said} (see windlass {command} --help)\n"
    assert capsys.readouterr().err == expected


def test_environment_variables_are_ours() -> None:
    serving = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert "WINDLASS_CACHE" in serving
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    known = {"WINDLASS_CACHE", *(parameter.envvar for parameter in command.params)}
    assert set(re.findall(r"WINDLASS_\w+", PAGE)) <= known


def test_a_command_of_ollama_is_told_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    commands = get_command(cli.app).commands  # type: ignore[attr-defined]
    page = {
        code(theirs)[0].split()[1]: (ours, *remark) for theirs, ours, *remark in rows("Ollama") if "`ollama " in theirs
    }
    page["ls"] = page["list"]
    assert (
        set(page) - set(commands)
        == {word for names in migration_hints._COMMANDS for word in names.split()}
        >= {"run", "rm"}
    )
    for verb in set(page) - set(commands):
        assert cli.run([verb, "smollm2"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: No such command '{verb}': ") and said.endswith(" (see windlass --help)\n")
        ours, *_ = code(page[verb][0]) or [""]
        assert set(re.findall(r"windlass \w+", said)) >= set(re.findall(r"^windlass \w+", ours))
        assert set(re.findall(r"`windlass (\w+)", said)) <= set(commands)
        assert ours or set(re.findall(r"\w+", said)) & set(re.findall(r"\w+", page[verb][1])) - {"the", "that"}
    for known in (["rope", "run"], ["bench", "ls"]):
        assert cli.run(known) == 2 and "here it is" not in capsys.readouterr().err
    assert cli.run(["servee"]) == 2 and "Did you mean 'serve'?" in capsys.readouterr().err
