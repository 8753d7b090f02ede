"""The pages tell what the code takes and prints: fields, options, metrics, rotary kinds, and links that lead somewhere."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from helpers.live_server import toy_tokenizer
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_llm import asked, scripted_llm
from typer.main import get_command

from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, apply_scaling, resolve
from windlass.engine.rotary.scaling_fields import KINDS
from windlass.server.api.rotary import RotaryInspectRequest
from windlass.server.api.tokenize import DetokenizeRequest, TokenizeRequest
from windlass.server.application import create_app
from windlass.server.cli import main as cli
from windlass.server.config.api_keys import ApiKey
from windlass.server.config.settings import ServerSettings
from windlass.server.schemas.chat import ChatMessage, ChatRequest
from windlass.server.schemas.completions import CompletionRequest
from windlass.server.schemas.generation import StreamOptions
from windlass.server.schemas.messages import CountTokensRequest, MessageRequest
from windlass.server.schemas.responses import ResponseRequest
from windlass.server.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """What stands below a heading, until the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    start = page.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{1,{level}}} ", page[start:], re.MULTILINE)
    return page[start : start + end.start()] if end else page[start:]


def names_in(text: str) -> set[str]:
    """Every word inside backquotes."""
    return {word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[\w-]+", code)}


HTTP, SERVING, ROTARY, MONITORING = read("http.md"), read("serving.md"), read("rotary.md"), read("monitoring.md")
RESPONSES = read("responses.md")
MESSAGES = read("messages.md")
COMMON = section(HTTP, "## Fields of both generation endpoints")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (CompletionRequest, COMMON + section(HTTP, "## `POST /v1/completions`")),
        (ChatRequest, COMMON + section(HTTP, "## `POST /v1/chat/completions`")),
        (ChatMessage, section(HTTP, "## `POST /v1/chat/completions`")),
        (StreamOptions, COMMON),
        (ResponseRequest, COMMON + RESPONSES),
        (MessageRequest, COMMON + MESSAGES),
        (CountTokensRequest, MESSAGES),
        (TokenizeRequest, section(HTTP, "## Tokens")),
        (DetokenizeRequest, section(HTTP, "## Tokens")),
        (RotaryInspectRequest, section(HTTP, "## Rotary")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_request_field_is_on_the_page(model, text):
    assert not set(model.model_fields) - names_in(text)


def test_the_page_of_models_is_the_one_that_the_registry_makes_now():
    made = spec_from_file_location("make_models_page", ROOT / "docs" / "make_models_page.py")
    module = module_from_spec(made)
    made.loader.exec_module(module)
    assert module.page() == read("models.md"), "run docs/make_models_page.py"


def test_every_endpoint_is_on_the_page():
    paths = create_toy_app().openapi()["paths"]
    assert len(paths) >= 12
    table = section(HTTP, "## Endpoints")
    for path, methods in paths.items():
        for method in methods:
            shown = path.replace("{model}", "{id}").replace("{response_id}", "{id}")
            assert f"`{method.upper()} {shown}`" in table, f"{method} {path}"


def create_toy_app(engine: ScriptedEngine | None = None, tokenizer: Tokenizer | None = None, **settings):
    settings = ServerSettings(served_model_name="toy", **settings)
    return create_app(engine or ScriptedEngine(), tokenizer or toy_tokenizer(), settings)


def test_every_metric_is_on_the_page():
    async def scrape() -> str:
        caller = replace(ApiKey.plain("k"), name="alice")
        transport = httpx.ASGITransport(create_toy_app(callers=(caller,)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"x-api-key": "k"}) as client:
            return (await client.get("/metrics")).text

    printed = set(re.findall(r"^# TYPE (\S+) ", asyncio.run(scrape()), re.MULTILINE))
    rows = set(re.findall(r"`(windlass_\w+)`", section(MONITORING, "## Metrics")))
    assert len(printed) > 15
    assert not printed - rows
    # A counter that has not counted yet has no creation time yet.
    assert not {name for name in rows - printed if not name.endswith("_created")}


def serve_options() -> dict[str, str | None]:
    """Every spelling of every option of `windlass serve`, with its environment variable."""
    command = get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    found = {}
    for parameter in command.params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            if name.startswith("--"):
                found[name] = parameter.envvar
    return found


def test_every_option_is_on_the_page():
    options = serve_options()
    assert len(options) > 25
    named = set(re.findall(r"`(--[\w-]+)`", SERVING))
    assert not set(options) - {"--help"} - named
    assert not named - set(options) - {"--help"}


def rotary_examples() -> list[dict]:
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", ROTARY, re.DOTALL)]
    commands = re.findall(r"\{\"rope_type\"[^{}]*\}", ROTARY)
    return blocks + [json.loads(text) for text in commands]


@pytest.mark.parametrize("example", rotary_examples(), ids=json.dumps)
def test_rotary_examples_are_accepted(example):
    scaling = RopeScaling.from_dict(example)
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 12}
    if scaling.groups:
        assert len(apply_scaling(read_rotary_groups(gemma), scaling)) == 2
        return
    size = 2 * len(example.get("short_factor", [1] * 32))
    learned = tuple(0.9**j for j in range(size // 2)) if example["rope_type"] == "learned" else None
    base = RotaryBase(10_000.0, size, size, 8192, inv_freq=learned)
    spec = resolve(scaling, base, 8193)
    assert len(spec.inv_freq) == size // 2
    assert example["rope_type"] in ("default", "learned") or spec != resolve(RopeScaling(), base, 8193)


def test_every_rotary_kind_has_an_example():
    assert {example.get("rope_type") for example in rotary_examples()} >= set(KINDS)


README = (ROOT / "README.md").read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = unquote(target).partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, target


INSIDE = [ROOT / "docs" / name for name in ("architecture.md", "where.md")]
FOLDERS = ("server", "engine", "kernels", "clients", "lab", "tests", "docs", "deploy", "benchmarks", "models")


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_files_and_classes_that_a_page_names_are_there(page):
    """A path from the top; a file's name alone stands for one that is somewhere."""
    files = {path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*")}
    files |= {path.relative_to(ROOT) for path in ROOT.iterdir() if path.is_file()}
    known = {str(path) for path in files} | set(FOLDERS)
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = set(re.findall(r"`([\w./*-]+)`", text))
    paths = {name for name in named if re.match(rf"({'|'.join(FOLDERS)})/", name)}
    assert len(paths) > 25
    assert {name for name in paths if not fnmatch.filter(known, name.rstrip("/"))} == set()
    alone = {name for name in named - paths if re.search(r"\.(py|h|cpp|md|svg|toml|json|yml)$", name)}
    assert alone - {path.name for path in files} == set()
    code = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in files if path.suffix == ".py")
    classes = {name for name in named if re.fullmatch(r"([A-Z][a-z]+){2,}", name)}
    assert {name for name in classes if not re.search(rf"^class {name}\b", code, re.MULTILINE)} == set()


def test_nothing_advises_to_install_windlass_by_name():
    """The name is a stranger's on the package index, and nothing of this project is published there."""
    code = [
        path for folder in ("server", "engine", "kernels", "clients", "lab") for path in (ROOT / folder).rglob("*.py")
    ]
    files = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile", ROOT / "Makefile", *code]
    assert len(files) > 150
    by_name = re.compile(r"pip3? install [^`\n]*\bwindlass(?!-llm/|/)(-llm|-client)?\b(\[|['\"` ]|$)", re.MULTILINE)
    assert by_name.search("run `pip install 'windlass[hub]'`") and by_name.search("pip install -q windlass-client\n")
    assert [str(path) for path in files if by_name.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_the_first_load_test_in_the_readme_makes_what_it_compares(tmp_path):
    """Its commands as they stand, but for the address: runs, a page, and a comparison with intervals and verdicts."""
    (script,) = re.findall(r"```bash\n(.*?)```", section(README, "## A first load test"), re.DOTALL)
    programs = Path(sys.executable).parent
    with scripted_llm(asked()) as llm:
        done = subprocess.run(
            ["bash", "-euc", script.replace("http://127.0.0.1:8000", llm.url)],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.split("B − A")[1].splitlines()
    latencies = [row for row in rows if re.search(r"\b(mean|p50|p90|p95)\b", row)]
    assert len(latencies) >= 16
    assert all(re.search(r"[+-][\d.,]+ to [+-]", row) for row in latencies), "\n".join(rows)
    assert "one run cannot tell" not in done.stdout
    assert {path.name for path in tmp_path.glob("*.html")} == {"2-clients.html", "8-clients.html"}
