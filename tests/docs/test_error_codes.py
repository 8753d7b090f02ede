"""The table of errors in docs/http.md has the codes that are written where errors are made, and none that nothing speaks of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from helpers.doc_examples import ROOT

RAISED = ("ApiError", "RequestError", "bad_request", "unavailable")  # the third argument is a code, where it stands so
# A client that left gets no answer; requests of the server have ids of its own.
NEVER_SENT = {"client_disconnected", "duplicate_request_id"}


def trees() -> Iterator[ast.AST]:
    for folder in ("server", "engine", "lab"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text(encoding="utf-8"))


def strings(node: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def raised(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        given = [one.value for one in node.keywords if one.arg == "code"]
        given += node.args[2:3] if name in RAISED else []
        yield from (text for one in given for text in strings(one) if re.fullmatch(r"[a-z]+(_[a-z]+)*", text))


def test_the_table_has_the_codes_of_errors_and_none_that_is_nowhere() -> None:
    page = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    table = page[page.index("| status | `code` |") : page.index("## Limits")]
    told = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", table)) - {"code", "rope_scaling", "rope_update"}
    found, literals = set[str](), set[str]()
    for tree in trees():
        found |= set(raised(tree))
        literals |= strings(tree)
    assert len(found) > 40
    assert found - NEVER_SENT - told == set()
    # Some are made of a kind and what befell it: grammar_timeout.
    parts = {
        f"{kind}{fate}" for kind in literals & {"grammar", "template", "text"} for fate in literals if fate[:1] == "_"
    }
    assert told - literals - parts == set()
