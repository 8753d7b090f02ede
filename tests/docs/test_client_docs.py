"""Python examples of the pages about clients, run with the bundled model instead of smollm2."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from helpers.doc_examples import blocks_of
from helpers.real_server import RealServer

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/clients.md",
    "docs/openai.md",
    "docs/responses.md",
    "docs/embeddings.md",
    "docs/guides/endless-generation.md",
    "docs/messages.md",
    "docs/structured-output.md",
    "docs/tools.md",
)
EXAMPLES = [
    pytest.param(page, block.source, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        block for block in blocks_of(ROOT / page) if block.language == "python" and block.not_run is None
    )
]
# Output of the examples whose errors would otherwise go unnoticed.
PRINTS = {
    "docs/clients.md-2": r" (length|stop) \d+ default$",
    "docs/clients.md-3": r"^Animal\(kind='\w+', legs=[024]\)\nlook_up \{'word': '(horse|sea)'\}\n",
    "docs/clients.md-5": r"^rotate 512\.0 0\n[\s\S]*'factor': 2\.0\}$",
    "docs/clients.md-6": r"^rope_scaling\.beta_fast .*beta_fast must not be smaller than beta_slow",
    "docs/clients.md-7": r"^long \{'rope_type': 'yarn', 'factor': 2\.0\} [0-9a-f]{64}\nyarn$",
    "docs/clients.md-9": r"^change the request: temperature should be greater than or equal to 0$",
    "docs/embeddings.md-0": r"^\d+ 0\.\d+\n\[1?0?\.\d+, 0\.\d+\]$",
    "docs/embeddings.md-1": r"^'.*' 0\n['\"].*['\"] [1-9]\d+$",
    "docs/guides/endless-generation.md-0": r"^0$",
    "docs/messages.md-0": r"^\d+\n.* (max_tokens|end_turn)\n",
    "docs/openai.md-1": r"^yarn [0-9a-f]{64} None\n",
    "docs/openai.md-2": r"yarn 2\.0\n$",
    "docs/responses.md-0": r" \d+\n\S",
    "docs/responses.md-1": r" (completed|incomplete) \d+\n[\s\S]*message 1 True$",
    "docs/openai.md-4": r"^rope_scaling\.factor invalid_value \S+ rope_scaling\.factor must be",
}


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
    source = source.replace("http://127.0.0.1:8000", demo_server.url).replace('"smollm2"', '"demo"')
    space: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, page, "exec", dont_inherit=True), space)
    if isinstance(space.get("client"), openai.OpenAI):
        space["client"].close()
    printed = capsys.readouterr().out
    assert "tell the operator" not in printed and "no server there" not in printed
    assert re.search(PRINTS.get(request.node.callspec.id, ""), printed, re.MULTILINE), printed
