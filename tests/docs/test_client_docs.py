"""Python examples of the pages about clients, run with the bundled model instead of the default one."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from helpers.doc_examples import Block, blocks_of
from helpers.real_server import RealServer

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/guides/endless-generation.md",
    "docs/guides/embeddings.md",
    "docs/guides/structured-output.md",
    "docs/guides/tool-calling.md",
    "docs/reference/http-api.md",
    "docs/reference/python.md",
)


def is_run_here(block: Block) -> bool:
    """The examples of `LLM` on the page about Python are run by tests/e2e/test_in_process.py."""
    in_process = block.page == "docs/reference/python.md" and "from windlass import LLM" in block.source
    return block.language == "python" and block.not_run is None and not in_process


EXAMPLES = [
    pytest.param(page, block.source, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(filter(is_run_here, blocks_of(ROOT / page)))
]
# Output of the examples whose errors would otherwise go unnoticed.
PRINTS = {
    "docs/guides/endless-generation.md-0": r"^0$",
    "docs/guides/embeddings.md-0": r"^\d+ 0\.\d+\n\[1?0?\.\d+, 0\.\d+\]$",
    "docs/guides/embeddings.md-1": r"^['\"].*['\"] 0\n['\"].*['\"] [1-9]\d+$",
    "docs/reference/http-api.md-0": r" \d+\n\S",
    "docs/reference/http-api.md-1": r"^\d+\n.* (max_tokens|end_turn)\n",
    "docs/reference/python.md-2": r" (length|stop) \d+ default$",
    "docs/reference/python.md-3": r"^Animal\(kind='\w+', legs=[024]\)\nlook_up \{'word': '(horse|sea)'\}\n",
    "docs/reference/python.md-4": r"^rotate 512\.0 0\n[\s\S]*'factor': 2\.0\}$",
    "docs/reference/python.md-5": r"^rope_scaling\.beta_fast .*beta_fast must not be smaller than beta_slow",
    "docs/reference/python.md-6": r"^long \{'rope_type': 'yarn', 'factor': 2\.0\} [0-9a-f]{64}\nyarn$",
    "docs/reference/python.md-8": r"^change the request: temperature should be greater than or equal to 0$",
    "docs/reference/python.md-11": r"^yarn [0-9a-f]{64} None\n[\s\S]* yarn 4\.0\n\d+ [0-9a-f]{64}$",
    "docs/reference/python.md-12": r"^rope_scaling\.factor invalid_value \S+ rope_scaling\.factor must be",
}


def test_patterns_belong_to_examples() -> None:
    assert set(PRINTS) <= {example.id for example in EXAMPLES}


@pytest.mark.parametrize(("page", "source"), EXAMPLES)
def test_example(
    page: str,
    source: str,
    demo_server: RealServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("WINDLASS_BASE_URL", demo_server.url)
    source = source.replace("http://127.0.0.1:8000", demo_server.url).replace('"qwen2.5-coder-1.5b"', '"demo"')
    space: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, page, "exec", dont_inherit=True), space)
    if isinstance(space.get("client"), openai.OpenAI):
        space["client"].close()
    printed = capsys.readouterr().out
    assert "report to the operator" not in printed and "no server at" not in printed
    assert re.search(PRINTS.get(request.node.callspec.id, ""), printed, re.MULTILINE), printed
