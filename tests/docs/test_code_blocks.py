"""Code blocks of the pages: Python runs in a test or has a reason why not, data can be parsed, commands and options exist."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.doc_examples import ROOT, Block, blocks_of
from typer.main import get_command

from windlass.clients.loadtest import commands as loadtest
from windlass.server.cli import main as cli

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]

# The tests that run the Python of a page. Blocks of other pages need `<!-- not run: … -->`.
RUN_BY = {
    "tests/docs/test_client_docs.py": {
        "README.md",
        "docs/guides/endless-generation.md",
        "docs/guides/embeddings.md",
        "docs/guides/structured-output.md",
        "docs/guides/tool-calling.md",
        "docs/reference/http-api.md",
        "docs/reference/python.md",
    },
    "tests/docs/test_load_testing_docs.py": {"docs/guides/load-testing.md"},
    "tests/e2e/test_in_process.py": {"docs/reference/python.md", "docs/start/quickstart.md"},
    "tests/docs/test_guide_pages.py": {"docs/internals/rotary-embeddings.md"},
}


def test_every_python_block_runs_or_has_a_reason_why_not() -> None:
    running = set().union(*RUN_BY.values())
    python = [block for block in BLOCKS if block.language == "python"]
    unrun = [f"{b.page}:{b.line}" for b in python if b.not_run is None and b.page not in running]
    assert unrun == []
    assert running <= {block.page for block in python if block.not_run is None}
    for test, pages in RUN_BY.items():
        text = (ROOT / test).read_text(encoding="utf-8")
        for page in pages:
            assert Path(page).name in text, f"{test} does not run {page}"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in ("json", "yaml")], ids=lambda b: f"{b.page}:{b.line}"
)
def test_data_can_be_parsed(block: Block) -> None:
    """JSON may contain … for omitted parts."""
    if block.language == "yaml":
        assert yaml.safe_load(block.source)
        return
    text = re.sub(r"(,\s*)?…(?!\")", "", block.source)
    decoder, at = json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        _, end = decoder.raw_decode(text, at)
        at = end + len(re.match(r"\s*", text[end:])[0])  # type: ignore[index]


def lines_of(block: Block) -> Iterator[str]:
    """The commands of a block, with continued lines joined."""
    yield from block.source.replace("\\\n", " ").splitlines()


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for block in BLOCKS:
        if block.language not in ("bash", "sh"):
            continue
        for line in lines_of(block):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                continue  # a quotation of several lines
            while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("do", "time", "&&", "then")):
                words = words[1:]
            if words:
                found.append((f"{block.page}:{block.line}", words))
    return found


COMMANDS = commands()
OWN = [
    pytest.param(where, words, id=f"{where} {' '.join(words[:3])}")
    for where, words in COMMANDS
    if words[0].endswith(("windlass", "windlass-bench"))
]


@functools.cache
def command_of(program: str) -> Any:
    """The click command of a program."""
    return get_command(cli.app if program == "windlass" else loadtest.app)


@pytest.mark.parametrize(("where", "words"), OWN)
def test_commands_of_windlass_and_their_options_exist(where: str, words: list[str]) -> None:
    command = command_of(Path(words[0]).name)
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{where}: no command {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    end = next((at for at, word in enumerate(rest) if word in ("|", ">", "&", ";", "&&", "--")), len(rest))
    for word in rest[:end]:
        if word.startswith("--"):
            assert word.split("=")[0].rstrip(";") in known, f"{where}: {' '.join(words)}"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        pytest.param(where, words, id=f"{where} {words[1]}")
        for where, words in COMMANDS
        if Path(words[0]).name.startswith("python") and len(words) > 1 and words[1].endswith(".py")
    ],
)
def test_scripts_and_their_options_exist(where: str, words: list[str]) -> None:
    script = ROOT / words[1]
    assert script.exists(), where
    sources = "\n".join(path.read_text(encoding="utf-8") for path in script.parent.rglob("*.py"))
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in sources, f"{where}: {word}"


def test_targets_of_make_exist() -> None:
    goals = {word for _, words in COMMANDS if words[0] == "make" for word in words[1:] if "=" not in word}
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert goals and goals <= made


def test_blocks_are_found_and_unknown_options_are_reported() -> None:
    page = ROOT / "docs" / "internals" / "rotary-embeddings.md"
    (first, *_) = blocks_of(page)
    assert (first.language, first.printed is not None, first.not_run) == ("python", True, None)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[first.line - 1] == first.source.splitlines()[0]
    with pytest.raises(AssertionError):
        test_commands_of_windlass_and_their_options_exist("here", ["windlass", "serve", "--no-such-option"])
