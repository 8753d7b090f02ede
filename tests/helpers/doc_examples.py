"""Code blocks of a page, their comments, and the output of Python blocks.

A block of Python may be followed at once by a block of `text`: what it prints. The blocks of a page share their names, from top
to bottom, as in a notebook. A comment `<!-- not run: WHY -->` before a block declares that no test runs it.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- not run: ([^\n]+?) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """line: of its first line of code. not_run: why no test runs it; None: one does. printed: of the `text` block right below."""

    page: str
    line: int
    language: str
    source: str
    not_run: str | None
    printed: str | None = None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    matches = list(BLOCK.finditer(text))
    for at, match in enumerate(matches):
        following = matches[at + 1] if at + 1 < len(matches) else None
        printed = None
        if following is not None and following[2] == "text" and not text[match.end() : following.start()].strip():
            printed = following[3]
        line = text.count("\n", 0, match.start(3)) + 1
        name = str(page.relative_to(ROOT))
        found.append(Block(name, line, match[2], match[3], match[1], printed))
    return found


def run_page(page: Path) -> tuple[list[tuple[Block, str]], dict[str, object]]:
    """Every Python block with what it printed, and the names that they left behind."""
    names: dict[str, object] = {"__name__": "__main__"}
    results = []
    for block in blocks_of(page):
        if block.language == "python" and block.not_run is None:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                # As many lines before it as on the page, so that a traceback names the right one.
                exec(compile("\n" * (block.line - 1) + block.source, block.page, "exec", dont_inherit=True), names)
            results.append((block, out.getvalue()))
    return results, names
