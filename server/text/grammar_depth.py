"""Depth of grammars: llguidance compiles a rule or schema by recursion into those that it refers to.

The depth is bounded before compiling, because a stack that overflows ends the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from windlass.server.text.schema_rewriting import LARK_LITERAL, resolve_reference, schema_children

# A node takes up to 7 KB of `GRAMMAR_STACK_BYTES` in llguidance 1.9.
MAX_GRAMMAR_DEPTH = 2000

_NAME = r"[A-Za-z_]\w*"
# A definition's parameter, attributes and priority may follow its name.
_DEFINED = rf"^[ \t]*[?!]*(?P<defined>{_NAME})(?:::\w+)?[ \t]*(?:\[[^\n]*?\])?[ \t]*(?:\.-?\d+)?[ \t]*:(?!:)"
_TOKEN = re.compile(
    rf"{LARK_LITERAL}|(?P<json>%json)\b[ \t\r\n]*|{_DEFINED}|(?P<name>{_NAME})|(?P<bracket>[()\[\]])",
    re.DOTALL | re.MULTILINE,
)

# A node is the name of a rule, or a part of a schema. A reference is a node and the levels between it and what refers to it.
_Reference = tuple[Any, int]


def check_depth(grammar: str) -> None:
    """Raise ValueError if rules or schemas of a serialized grammar refer to each other too deeply."""
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"] if grammar.startswith("{") else []
    for part in parts or [{"lark_grammar": grammar}]:
        lark, schema = part.get("lark_grammar"), part.get("json_schema")
        depth = _depth([(schema, 1)], partial(_of_schema, root=schema)) if lark is None else _lark_depth(lark)
        if depth > MAX_GRAMMAR_DEPTH:
            raise ValueError(
                f"its rules or schemas refer to each other {depth} levels deep; the limit is {MAX_GRAMMAR_DEPTH}"
            )


def _lark_depth(text: str) -> int:
    rules: dict[str, list[_Reference]] = {}
    roots: dict[int, Any] = {}  # the document of each inline schema and of its parts, by id
    references: list[_Reference] = []
    brackets = position = 0
    decoder = json.JSONDecoder()
    while (token := _TOKEN.search(text, position)) is not None:
        position = token.end()
        if (name := token["defined"]) is not None:
            references, brackets = rules.setdefault(name, []), 0
        elif (name := token["name"]) is not None:
            references.append((name, brackets + 1))
        elif token["bracket"] is not None:
            brackets += 1 if token["bracket"] in "([" else -1
        elif token["json"] is not None:
            try:
                schema, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                continue  # the compiler reports it
            references.append((schema, brackets + 1))
            roots[id(schema)] = schema

    def referred(node: Any) -> Iterable[_Reference]:
        if isinstance(node, str):
            return rules.get(node, ())
        root = roots[id(node)]
        found = list(_of_schema(node, root))
        roots.update((id(part), root) for part, _ in found)
        return found

    # The first rule is `start`; rules that it does not use are compiled by themselves, if at all.
    return _depth([("start", 1), *((name, 1) for name in rules)], referred)


def _of_schema(part: Any, root: Any) -> Iterable[_Reference]:
    """The schemas of a schema in their order, and the one that its `$ref` names."""
    for child in schema_children(part):
        yield child, 1
    if isinstance(reference := part.get("$ref"), str):
        yield resolve_reference(root, reference), 1


def _depth(roots: Iterable[_Reference], referred: Callable[[Any], Iterable[_Reference]]) -> int:
    """The number of levels to which a traversal descends that visits each node once, in order, as the compiler does."""
    deepest = 0
    seen: set[Any] = set()
    stack = [(0, iter(roots))]
    while stack:
        depth, remaining = stack[-1]
        deepest = max(deepest, depth)
        for node, levels in remaining:
            key = node if isinstance(node, str) else id(node)
            if isinstance(node, str | dict) and key not in seen:
                seen.add(key)
                stack.append((depth + levels, iter(referred(node))))
                break
        else:
            stack.pop()
    return deepest
