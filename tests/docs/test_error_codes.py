"""Completeness of the table of error codes in docs/reference/http-api.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from helpers.doc_examples import ROOT

RAISED = ("ApiError", "RequestError", "bad_request", "unavailable")  # the third argument is the code
# A disconnected client gets no answer, and the ids of requests come from the server.
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


def test_the_table_has_every_code_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "http-api.md").read_text(encoding="utf-8")
    table = page[page.index("| status | `code` |") : page.index("## Limits")]
    documented = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", table)) - {"code", "rope_scaling", "rope_update"}
    found, literals = set[str](), set[str]()
    for tree in trees():
        found |= set(raised(tree))
        literals |= strings(tree)
    assert len(found) > 40
    assert found - NEVER_SENT - documented == set()
    # Some are composed of a kind and a suffix: grammar_timeout.
    parts = {
        f"{kind}{suffix}"
        for kind in literals & {"grammar", "template", "text"}
        for suffix in literals
        if suffix[:1] == "_"
    }
    assert documented - literals - parts == set()
