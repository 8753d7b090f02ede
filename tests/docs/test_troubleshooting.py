"""docs/troubleshooting.md: every message that it explains is one that the code can give."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from helpers.doc_examples import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.split("## No message")[0].splitlines() if line.startswith("| `")]
MESSAGES = [re.findall(r"`([^`]+)`", row)[0] for row in ROWS]


@cache
def texts() -> list[str]:
    """Every string of the code, with … for what is filled in."""
    found = []
    for folder in ("server", "engine", "kernels", "clients", "lab"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                    found.append(node.value)
    return found


def can_be_said(message: str) -> bool:
    return any(message in text for text in texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_has_the_message(message: str) -> None:
    assert can_be_said(message), "look for what it says now"


def test_messages_are_found_and_others_are_not() -> None:
    assert len(MESSAGES) > 25 and len(set(MESSAGES)) == len(MESSAGES)
    assert not can_be_said("the weights needed … of memory, … are free")


def test_statuses_are_those_of_the_api() -> None:
    shown = {int(status) for status in re.findall(r"\| (\d{3}) \|", PAGE)}
    assert shown == {400, 401, 404, 429, 503}
