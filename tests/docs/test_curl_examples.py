"""Blocks of the pages that consist of curl commands to a server without options, run by bash with the bundled model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from helpers.doc_examples import ROOT, Block, blocks_of
from helpers.real_server import RealServer

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Requests that need another model, an adapter or an option of the server.
NOT_HERE = ("/classify", "token_classify", "/v1/attention", "lora", '"poet"', '"suffix"', "--unix-socket")
# By a part of the block: what its page writes about the answers.
ANSWERS = {
    '"cache_reuse": 64': r'"reused_passages":1\b',
    '"context_overflow": "shift"': r'"shifts":[1-9]',
    '"attention_window": 32': r'"attention_window":32,"attention_sinks":4\b',
    '"drop_turns"': r'"dropped_turns":0\b',
    '"factor": 4': r'"rope_type":"yarn"',
    '"documents"': r'"index":1\b',
    "embeddings": r'"embedding":\[',
    '"prompt": ["The king"': r'"index":3\b',
}


def is_run_here(block: Block) -> bool:
    lines = block.source.splitlines()
    return (
        block.language in ("bash", "sh")
        and "curl " in block.source
        and all(re.match(r"curl |\w+=|\s", line) for line in lines)
        and not any(part in block.source for part in NOT_HERE)
    )


EXAMPLES = [
    pytest.param(block, id=f"{block.page}:{block.line}")
    for page in PAGES
    for block in blocks_of(page)
    if is_run_here(block)
]


def test_examples_and_patterns_are_found() -> None:
    sources = [block.source for example in EXAMPLES for block in example.values if isinstance(block, Block)]
    assert len(sources) > 12
    assert all(any(part in source for source in sources) for part in ANSWERS)


@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("bash") is None, reason="curl and bash are needed")
@pytest.mark.parametrize("block", EXAMPLES)
def test_example(block: Block, demo_server: RealServer) -> None:
    commands = block.source.replace("http://127.0.0.1:8000", demo_server.url)
    assert commands != block.source
    # Enough for a shift in the context of this server.
    commands = commands.replace('"max_tokens": 400', '"max_tokens": 1100')
    commands = re.sub(r"^curl ", "curl -sS --fail-with-body ", commands, flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-ec", commands],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    patterns = [pattern for part, pattern in ANSWERS.items() if part in block.source]
    for pattern in patterns or [r'"text":"|"content":"']:
        assert re.search(pattern, done.stdout), done.stdout
