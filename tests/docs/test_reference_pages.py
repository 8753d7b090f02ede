"""Reference pages: completeness of their tables, examples that run, generated pages, and links."""

from __future__ import annotations

import asyncio
import fnmatch
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from click import Command
from helpers.live_server import toy_tokenizer
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_http import full_stream, scripted_llm
from typer.main import get_command

from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, apply_scaling, resolve
from windlass.engine.rotary.scaling_fields import KINDS
from windlass.server.api.rotary import RotaryCurvesRequest, RotaryInspectRequest
from windlass.server.api.tokenize import DetokenizeRequest, TokenizeRequest
from windlass.server.application import create_app
from windlass.server.cli import main as cli
from windlass.server.config.api_keys import ApiKey
from windlass.server.config.server_options import OPTIONS
from windlass.server.config.settings import ServerSettings
from windlass.server.schemas.chat import ChatMessage, ChatRequest
from windlass.server.schemas.completions import CompletionRequest
from windlass.server.schemas.generation import StreamOptions
from windlass.server.schemas.messages import CountTokensRequest, MessageRequest
from windlass.server.schemas.pooling import EmbeddingRequest
from windlass.server.schemas.responses import CountInputRequest, ResponseRequest
from windlass.server.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    level = len(heading) - len(heading.lstrip("#"))
    start = page.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{1,{level}}} ", page[start:], re.MULTILINE)
    return page[start : start + end.start()] if end else page[start:]


def field_names(text: str) -> set[str]:
    """Names of the fields that a part of fields.md has, or names with a link to the list that has them."""
    found = set[str]()
    for names in re.findall(r"^\* ((?:`\w+`, )*`\w+`):", text, re.MULTILINE):
        found |= set(re.findall(r"\w+", names))
    for also in re.findall(r"^Also: (.*)$", text, re.MULTILINE):
        for names, title in re.findall(r"((?:`\w+`(?:, | and ))*`\w+`) of \[(.+?)\]\(#[\w-]+\)", also):
            heading = f"## `POST {title.strip('`')}`" if "/" in title else f"## {title.capitalize()}"
            given = set(re.findall(r"\w+", names.replace(" and ", ", ")))
            assert given <= field_names(section(FIELDS, heading)), also
            found |= given
    return found


HTTP, ROTARY = read("reference/http-api.md"), read("reference/rotary-scaling.md")
FIELDS, METRICS = read("reference/fields.md"), read("reference/metrics.md")
COMMON = section(FIELDS, "## Common fields")
GENERATION = COMMON + section(FIELDS, "## Generation fields")
BOTH = GENERATION + section(FIELDS, "## Completion and chat fields")
RESPONSES = GENERATION + section(FIELDS, "## `POST /v1/responses`")
INSPECT = section(FIELDS, "## `POST /v1/rotary/inspect`")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (CompletionRequest, BOTH + section(FIELDS, "## `POST /v1/completions`")),
        (ChatRequest, BOTH + section(FIELDS, "## `POST /v1/chat/completions`")),
        (ChatMessage, section(FIELDS, "### ChatMessage")),
        (StreamOptions, section(FIELDS, "### StreamOptions")),
        (ResponseRequest, RESPONSES),
        (CountInputRequest, RESPONSES + section(FIELDS, "## `POST /v1/responses/input_tokens`")),
        (MessageRequest, GENERATION + section(FIELDS, "## `POST /v1/messages`")),
        (CountTokensRequest, section(FIELDS, "## `POST /v1/messages/count_tokens`")),
        (EmbeddingRequest, COMMON + section(FIELDS, "## Text fields") + section(FIELDS, "## `POST /v1/embeddings`")),
        (TokenizeRequest, section(FIELDS, "## `POST /tokenize`")),
        (DetokenizeRequest, section(FIELDS, "## `POST /detokenize`")),
        (RotaryInspectRequest, INSPECT),
        (RotaryCurvesRequest, INSPECT + section(FIELDS, "## `POST /v1/rotary/curves`")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_request_field_is_documented(model, text):
    assert not set(model.model_fields) - field_names(text)


def test_every_body_has_a_list_of_fields():
    paths = create_toy_app().openapi()["paths"]
    bodies = {path for path, methods in paths.items() for one in methods.values() if "requestBody" in one}
    assert len(bodies) > 15
    assert bodies == set(re.findall(r"^## `POST (\S+)`$", FIELDS, re.MULTILINE))


def test_limits_and_defaults_of_fields():
    """A sample of fields, as they must be."""
    for field in (
        "* `temperature`: *number 0–100; the model's `sampling_defaults`*.",
        "* `top_p`: *number > 0, ≤ 1; the model's `sampling_defaults`*.",
        "* `messages`: *array (1–16,384) of [ChatMessage](#chatmessage); required*.",
        "* `stop`: *string or array (≤ 64) of strings (1–256); none*.",
        '* `truncation_side`: *`"left"`, `"right"`; `left`*.',
        '* `rope_update`: *`"frozen"`, `"recompute"`, `"rotate"` or [RopeUpdateObject](#ropeupdateobject); the server\'s',
        "* `tokens`: *array (≤ 2,097,152) of integers ≥ 0; required*.",
    ):
        assert f"\n{field}" in FIELDS


def test_every_endpoint_is_documented():
    paths = create_toy_app().openapi()["paths"]
    table = section(HTTP, "## Endpoints")
    for path, methods in paths.items():
        for method in methods:
            shown = path.replace("{model}", "{id}").replace("{response_id}", "{id}")
            assert f"`{method.upper()} {shown}`" in table, f"{method} {path}"


def create_toy_app(engine: ScriptedEngine | None = None, tokenizer: Tokenizer | None = None, **settings):
    settings = ServerSettings(served_model_name="toy", **settings)
    return create_app(engine or ScriptedEngine(), tokenizer or toy_tokenizer(), settings)


def test_every_metric_is_documented():
    async def scrape() -> str:
        caller = replace(ApiKey.plain("k"), name="alice")
        transport = httpx.ASGITransport(create_toy_app(callers=(caller,)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers={"x-api-key": "k"}) as client:
            return (await client.get("/metrics")).text

    printed = set(re.findall(r"^# TYPE (\S+) ", asyncio.run(scrape()), re.MULTILINE))
    rows = set(re.findall(r"`(windlass_\w+)`", METRICS))
    assert len(printed) > 15
    assert not printed - rows
    # A counter without samples has no creation time.
    assert not {name for name in rows - printed if not name.endswith("_created")}


@pytest.fixture
def generator(monkeypatch):
    """The module that generates tables of pages."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    yield importlib.import_module("reference")
    sys.modules.pop("reference", None)


def test_generated_tables_are_up_to_date(generator):
    found = generator.pages()
    for path in found:
        text = path.read_text(encoding="utf-8")
        assert generator.updated(text) == text, f"{path}: run python tools/docs/reference.py"
    reference = {name for path, names in found.items() if path.parent.name == "reference" for name in names}
    assert reference == set(generator.TABLES)


def test_an_outdated_table_is_reported(generator):
    text = "before\n<!-- generated: neutral values -->\nold\n<!-- end -->\nafter"
    new = generator.updated(text)
    assert new.startswith("before\n") and new.endswith("\n\n<!-- end -->\nafter") and "| `n_probs` | `0` |" in new
    assert generator.updated(new) == new


def test_links_of_options_belong_to_options(generator):
    assert set(generator._LINKS) <= set(OPTIONS)


# Options of llama.cpp, Docker Compose, vLLM's load test, lm-eval, benchmarks/ and coding agents.
OTHER_PROGRAMS = {"--reranking", "--force-recreate", "--save-result", "--backend", "--apply_chat_template", "--shapes"}
OTHER_PROGRAMS |= {"--enable-prompt-tokens-details", "--goodput", "--ignore-eos", "--metrics"}
OTHER_PROGRAMS |= {"--bare", "--exclude-dynamic-system-prompt-sections", "--title", "--tools", "--yolo"}


def flags_of(command: Command) -> set[str]:
    """Options of a command and of all its subcommands."""
    own = {name for p in command.params if not getattr(p, "hidden", False) for name in (*p.opts, *p.secondary_opts)}
    return own.union(*(flags_of(each) for each in getattr(command, "commands", {}).values()))


def test_options_in_the_text_exist():
    flags = flags_of(get_command(cli.app)) | {"--help"}
    for folder in ("start", "guides"):
        for page in sorted((ROOT / "docs" / folder).glob("*.md")):
            if page.name != "coming-from.md":  # has options of other servers, and a test of its own
                named = set(re.findall(r"`(--[\w-]+)`", page.read_text(encoding="utf-8")))
                assert named - flags - OTHER_PROGRAMS == set(), page.name


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


def slug(heading: str) -> str:
    """The anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
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


INSIDE = [ROOT / "docs" / "internals" / "architecture.md"]
FOLDERS = ("server", "engine", "kernels", "clients", "lab", "tests", "docs", "deploy", "benchmarks", "models", "tools")


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_files_and_classes_named_on_a_page_exist(page):
    """Paths are relative to the repository; a file name alone may be in any folder."""
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


def test_no_text_recommends_installation_from_a_package_index():
    """This project is not published there, so the name may belong to another project."""
    code = [
        path for folder in ("server", "engine", "kernels", "clients", "lab") for path in (ROOT / folder).rglob("*.py")
    ]
    files = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile", ROOT / "Makefile", *code]
    assert len(files) > 150
    by_name = re.compile(r"pip3? install [^`\n]*\bwindlass(?!-llm/|/)(-llm|-client)?\b(\[|['\"` ]|$)", re.MULTILINE)
    assert by_name.search("run `pip install 'windlass[hub]'`") and by_name.search("pip install -q windlass-client\n")
    assert [str(path) for path in files if by_name.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_the_comparison_of_the_guide_to_load_tests_runs(tmp_path):
    """The commands with another address: runs, pages, and a comparison with intervals."""
    (script,) = re.findall(r"```bash\n(.*?)```", section(read("guides/load-testing.md"), "## Comparisons"), re.DOTALL)
    programs = Path(sys.executable).parent
    with scripted_llm(full_stream) as llm:
        done = subprocess.run(
            ["bash", "-euc", re.sub(r"http://127\.0\.0\.1:800[01]", llm.url, script)],
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
