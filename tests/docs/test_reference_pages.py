"""The pages tell what the code takes and prints: fields, options, metrics, rotary kinds, and links that lead somewhere."""

from __future__ import annotations

import asyncio
import fnmatch
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from helpers.live_server import SPECIAL_TOKENS, TEMPLATE, toy_tokenizer
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_llm import asked, scripted_llm
from helpers.toy_tokenizers import byte_level
from typer.main import get_command

from windlass.engine.interface.context import ContextRule
from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, apply_scaling, resolve
from windlass.engine.rotary.rotary_policy import RotaryReport, make_plan
from windlass.engine.rotary.scaling_fields import KINDS, fields_of
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
from windlass.server.serving.request_rotation import report_at
from windlass.server.serving.response_format import rotary_object
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


def test_the_page_names_no_field_that_is_refused_as_unknown():
    known = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields) | set(ChatMessage.model_fields)
    rows = re.findall(r"^\| (`[^|]+) \|", COMMON + section(HTTP, "## `POST /v1/chat/completions`"), re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert len(named) > 40
    assert not named - known


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


def test_variables_are_spelt_as_the_page_says():
    for name, variable in serve_options().items():
        if variable is not None and not name.startswith("--no-"):
            assert variable == "WINDLASS_" + name.removeprefix("--").replace("-", "_").upper()
    known = {
        "WINDLASS_MODEL",
        "WINDLASS_CACHE",
        "WINDLASS_CPU_ISA",
        "WINDLASS_",
        *filter(None, serve_options().values()),
    }
    assert not set(re.findall(r"\bWINDLASS_[A-Z_]*", SERVING)) - known


def test_defaults_on_the_page_are_the_code_s():
    rows = dict(re.findall(r"^\| `(--[\w-]+)`[^|]*\| ([^|]+) \|", SERVING, re.MULTILINE))
    checked = 0
    for parameter in get_command(cli.app).commands["serve"].params:  # type: ignore[attr-defined]
        default = parameter.default
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert float(rows[parameter.opts[0]]) == default, parameter.opts[0]
            checked += 1
    assert checked >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_every_rotary_kind_has_a_section_with_its_fields(kind):
    named = names_in(section(ROTARY, f"### `{kind}`")) | {"rope_theta"}
    assert not set(fields_of(kind)) - named


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


def test_the_grid_is_the_one_on_the_page():
    (numbers,) = re.findall(r"that is ([\d, ]+), …", ROTARY)
    expected = [round(2048 * 2 ** (step / 4)) for step in range(5)]
    assert [int(number) for number in numbers.split(", ")] == expected
    dynamic, base = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2}), RotaryBase(1e4, 64, 64, 2048)
    assert resolve(dynamic, base, 3000) == resolve(dynamic, base, 3444) != resolve(dynamic, base, 3445)


README = (ROOT / "README.md").read_text(encoding="utf-8")
DEMO = ROOT / "models" / "demo"


def demo_report(scaling: dict | None, update: str | None, prompt: int, tokens: int, context: int) -> RotaryReport:
    """The report of an answer of `tokens` tokens by the bundled model."""
    groups = read_rotary_groups(json.loads((DEMO / "config.json").read_text()))
    groups = apply_scaling(groups, scaling and RopeScaling.from_dict(scaling))
    plan = make_plan(groups, min(prompt + tokens, context), update)
    return report_at(plan, prompt, tokens)


def test_the_first_answer_in_the_readme_has_the_fields_of_an_answer():
    """What it says is compared with the model's own answer in tests/e2e/test_real_model.py."""
    shown, _ = re.findall(r"```json\n(.*?)```", section(README, "## A first request"), re.DOTALL)
    answer = json.loads(shown.replace("\n ", " "))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_attention_heads": 9,
    }
    config |= {"rope_theta": 1e5, "max_position_embeddings": 8192}
    report = report_at(make_plan(read_rotary_groups(config), 8192, None), 37, 8)

    async def ask() -> dict:
        tokenizer = Tokenizer(byte_level(), SPECIAL_TOKENS, {"default": TEMPLATE})
        app = create_toy_app(ScriptedEngine(report=lambda request: report), tokenizer)
        body = {"messages": [{"role": "user", "content": "a"}]}
        with closing(app.state.windlass):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return (await client.post("/v1/chat/completions", json=body)).json()

    real = asyncio.run(ask())
    assert list(answer) == list(real)
    assert answer["rotary"] == real["rotary"] and list(answer["usage"]) == list(real["usage"])
    (shown_choice,), (real_choice,) = answer["choices"], real["choices"]
    assert list(shown_choice) == list(real_choice) and list(shown_choice["message"]) == list(real_choice["message"])


def test_the_rotary_report_on_the_page_is_that_of_the_example():
    (shown,) = re.findall(r"```json\n(.*?)```", section(HTTP, "### The rotary report"), re.DOTALL)
    report = json.loads(shown)["rotary"]
    (body,) = re.findall(r"-d '(\{.*\"rotate\".*\})'", section(ROTARY, "## Examples"))
    (context,) = re.findall(r"serve demo --max-model-len (\d+)\n", section(ROTARY, "## Examples"))
    asked = json.loads(body)
    prompt = len(Tokenizer.from_directory(DEMO).encode(asked["prompt"]))
    arguments = asked["rope_scaling"], asked["rope_update"], prompt, asked["max_tokens"]
    expected = rotary_object(demo_report(*arguments, int(context)), None, ContextRule(), None)
    assert asked["ignore_eos"] and expected["moves"] == 2  # else it may stop before the first grid point
    start = report.pop("fingerprint").removesuffix("…")
    assert len(start) >= 4 and expected.pop("fingerprint").startswith(start)
    assert report == expected
    # In the model's own context no key turns, as the page says.
    assert demo_report(*arguments[:3], 512 - prompt, 512).moves == 0


LIMITS = {
    "max_body_bytes": "32 MiB",
    "max_total_body_bytes": "512 MiB",
    "max_header_bytes": "64 KiB",
    "max_prompts": "1,024",
    "max_tokenize_chars": "4,194,304",
    "max_response_bytes": "64 MiB",
    "max_in_flight": "4,096",
    "response_store_bytes": "64 MiB",
}


@pytest.mark.parametrize(("setting", "shown"), LIMITS.items())
def test_limits_on_the_page_are_the_code_s(setting, shown):
    number, _, unit = shown.replace(",", "").partition(" ")
    value = int(number) * {"": 1, "KiB": 2**10, "MiB": 2**20}[unit]
    assert getattr(ServerSettings(served_model_name="x"), setting) == value
    assert shown in section(HTTP, "## Limits")


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


def commands_on(page: str) -> list[tuple[int, str]]:
    """Where each line of a shell block stands, and the line."""
    blocks = re.finditer(r"```(?:bash|sh)\n(.*?)```", page, re.DOTALL)
    return [
        (block.start(1) + line.start(), line.group())
        for block in blocks
        for line in re.finditer(r"^.+$", block[1], re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_how_to_have_its_commands_before_the_first_of_them(page):
    """A clone has windlass in .venv/bin, not on the path."""
    text = page.read_text(encoding="utf-8")
    bare = [place for place, line in commands_on(text) if line.startswith(("windlass ", "windlass-bench "))]
    if bare:
        assert ". .venv/bin/activate" in text[: bare[0]]


def test_the_pages_with_commands_are_found():
    found = {page.name for page in PAGES if any(c.startswith("windlass ") for _, c in commands_on(page.read_text()))}
    assert found >= {"README.md", "serving.md", "rotary.md", "load-testing.md", "load-test-reports.md"}


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
