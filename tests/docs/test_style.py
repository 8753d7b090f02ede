"""`tools/docs/style.py`: planted phrases are found in prose, and code is not read."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.doc_examples import ROOT

SCRIPT = ROOT / "tools" / "docs" / "style.py"
STYLE = runpy.run_path(str(SCRIPT))


def findings(name: str, text: str) -> list[str]:
    return STYLE["findings"](name, text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("docs/page.md", "# A page\n\nThe log tells it.\n", "docs/page.md:3: tells"),
        ("docs/page.md", "One\nthing goes\non here.\n", "docs/page.md:2: goes on"),
        ("docs/page.md", "A [link](page.md) says so.\n", "docs/page.md:1: says"),
        ("engine/a.py", '"""Whoever calls this."""\n', "engine/a.py:1: Whoever"),
        ("engine/a.py", "x = 1  # a step beside it\n", "engine/a.py:1: beside"),
        ("engine/a.py", 'def f():\n    """Text.\n\n    What it takes.\n    """\n', "engine/a.py:4: What it takes"),
        ("server/a.py", 'error = f"the server of {name} shall not start"\n', "server/a.py:1: shall"),
        (
            "server/a.py",
            'call(\n    "Idle timeout. ",\n    "A request is no stream and ends.",\n)\n',
            "server/a.py:3: is no stream",
        ),
        ("tests/unit/test_a.py", '"""Likewise."""\n', "tests/unit/test_a.py:1: Likewise"),
        ("kernels/cpu/src/a.h", "int a; // room for b\n", "kernels/cpu/src/a.h:1: room"),
        ("server/app/ui/a.js", "/* first\n   it stands here */\n", "server/app/ui/a.js:2: stands"),
        ("Makefile", '\t@echo "make all  builds anew"\n', "Makefile:1: anew"),
        ("pyproject.toml", "# nobody needs it\n", "pyproject.toml:1: nobody"),
    ],
)
def test_planted_phrases_are_found_with_their_line(name: str, text: str, expected: str) -> None:
    (found,) = findings(name, text)
    place, replacement = found.split(" -> ")
    assert place == expected
    assert replacement


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("docs/page.md", "```bash\nwindlass say # and tell\n```\n"),
        ("docs/page.md", "The fields `logprobs`, `told` and `say_it`, and [a link](what-it-says.md#told).\n"),
        ("docs/page.md", "<!-- not run: nobody -->\nStandard rules look up a label; there is no limit.\n"),
        ("engine/a.py", "told = tell(said)\nbeside_norm = shall\n"),
        ("engine/a.py", 'KEY = "beside"\nx = {"told": 1}\n'),
        ("engine/a.py", '"""Value of `told`, next to `room`."""\n'),
        ("server/a.py", 'error = f"the value of {told} in this request is invalid"\n'),
        ("tests/unit/test_a.py", 'PROMPT = "The king said that the sea lies there."\n'),
        ("server/app/ui/a.js", 'const url = "https://said.example/room";\n'),
        ("docs/page.bin", "told"),
    ],
)
def test_code_is_not_flagged(name: str, text: str) -> None:
    assert findings(name, text) == []


def test_each_phrase_has_a_replacement_that_is_not_flagged() -> None:
    for phrase, replacement in STYLE["PHRASES"].items():
        assert replacement and findings("docs/page.md", replacement) == [], phrase


def test_exit_status_and_output() -> None:
    command = [sys.executable, str(SCRIPT), str(Path("tools") / "docs" / "style.py")]
    clean = subprocess.run([*command[:2], "CONTRIBUTING.md"], cwd=ROOT, capture_output=True, text=True)
    assert (clean.returncode, clean.stdout) == (0, "")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # its own list of phrases
    assert found.returncode == 1
    assert found.stdout.startswith("tools/docs/style.py:") and " -> " in found.stdout


def test_every_tracked_file_passes() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
