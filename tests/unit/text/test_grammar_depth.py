"""Depth of grammars: chains of rules and schemas compile, or are refused with a reason, on any host."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from unit_helpers.grammar_draws import DEMO, demo_compiler

from windlass.engine.errors import RequestError
from windlass.server.text.grammars import MAX_GRAMMAR_DEPTH, check_depth

TOO_MANY = MAX_GRAMMAR_DEPTH + 1


def rules(count: int, name: str = "a", define: str = ":") -> str:
    """A chain of rules, after its first one."""
    chain = [f'{name}{i}{define} "x" {name}{i + 1} | "y"' for i in range(count)]
    return "\n".join([*chain, f'{name}{count}{define} "z"'])


def referring(count: int, root: str = "#/$defs/", **first: Any) -> dict[str, Any]:
    """A chain of definitions, each an object whose member is the next one."""
    links = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"{root}a{i + 1}"}}} for i in range(count)}
    return {"$ref": f"{root}a0", "$defs": {**links, f"a{count}": {"type": "string"}}, **first}


def listed(count: int) -> dict[str, Any]:
    links = [{"items": {"$ref": f"#/list/{i + 1}"}} for i in range(count)]
    return {"$ref": "#/list/0", "list": [*links, {}]}


def backwards(count: int) -> dict[str, Any]:
    chain = referring(count)
    return {"$defs": dict(reversed(chain["$defs"].items())), "$ref": chain["$ref"]}


CHAINS: dict[str, tuple[str, Callable[[int], str]]] = {
    "Lark": ("grammar", lambda n: f"start: a0\n{rules(n)}"),
    "Lark, last rule first": ("grammar", lambda n: "\n".join(reversed(f"start: a0\n{rules(n)}".splitlines()))),
    "terminals": ("grammar", lambda n: f"start: A0\n{rules(n, 'A')}"),
    "attributes": ("grammar", lambda n: f"start: a0\n{rules(n, define='[capture]:')}"),
    "GBNF": ("grammar", lambda n: f"root ::= a0\n{rules(n, define=' ::=')}"),
    "definitions": ("json_schema", lambda n: json.dumps(referring(n))),
    "strict definitions": ("strict_json_schema", lambda n: json.dumps(referring(n))),
    "last definition first": ("json_schema", lambda n: json.dumps(backwards(n))),
    "escaped references": ("json_schema", lambda n: json.dumps(referring(n, "#/%24defs/"))),
    "a list of schemas": ("json_schema", lambda n: json.dumps(listed(n))),
    "a schema in Lark, as of a tool": ("lark", lambda n: f"start: call\ncall: %json {json.dumps(referring(n))}"),
}


SLOW = {"GBNF"}  # its conversion to Lark


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("kind", "chain"),
    [pytest.param(*chain, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, chain in CHAINS.items()],
)
def test_chains_compile_up_to_a_depth(kind: str, chain: Callable[[int], str]) -> None:
    assert demo_compiler().compile(kind, chain(300))
    with pytest.raises(RequestError, match=r"\d{4} levels deep; the limit is") as refused:
        demo_compiler().compile(kind, chain(TOO_MANY))
    assert refused.value.message.startswith("this ") and "\n" not in refused.value.message


def test_the_alternative_of_a_form_is_bounded() -> None:
    with pytest.raises(RequestError, match="levels deep"):
        demo_compiler().compile("regex", "a+", f"start: a0\n{rules(TOO_MANY)}")


def test_brackets_around_references_count() -> None:
    nested = "\n".join(f"a{i}: {'(' * 20}a{i + 1}{')' * 20}" for i in range(100))
    with pytest.raises(ValueError, match="levels deep"):
        check_depth(f'start: a0\n{nested}\na100: "x"')


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + " | ".join(f"a{i}" for i in range(5000)) + "\n" + "\n".join(f'a{i}: "x{i}"' for i in range(5000)),
        'start: "(" start ")" | a\na: start | "b" a',
        "start: A" + "".join(f'\nA{i or ""}: "A{i + 1}" /A{i + 1}/ // A{i + 1}' for i in range(5000)),
    ],
    ids=["many rules", "recursive rules", "names in strings, patterns and comments"],
)
def test_wide_and_recursive_grammars_are_shallow(grammar: str) -> None:
    check_depth(grammar)


def test_recursive_schemas_are_shallow() -> None:
    names = [f"t{i}" for i in range(40)]
    every = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    definitions = {name: {"type": "object", "properties": every} for name in names}
    assert demo_compiler().compile("json_schema", json.dumps({"$ref": "#/$defs/t0", "$defs": definitions}))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [700, MAX_GRAMMAR_DEPTH - 10])
def test_deep_grammars_compile_where_threads_have_small_stacks(depth: int) -> None:
    """In a process of its own, which would crash. 1 MiB is half of what threads have where the limit is unlimited."""
    program = f"""
        import sys, threading
        from pathlib import Path
        from windlass.engine.sampling.grammar import GrammarCompiler
        from windlass.server.text import grammars
        from windlass.server.text.tokenizer import Tokenizer

        def compile():
            text = sys.stdin.read()
            grammar = grammars.GrammarCompiler(Tokenizer.from_directory({str(DEMO)!r})).compile("grammar", text)
            engine = GrammarCompiler(Path({str(DEMO)!r}), 4096, [2])
            engine.compile_in_background(grammar, "caller").result()
            GrammarCompiler(Path({str(DEMO)!r}), 4096, [2]).begin(grammar)
            print("compiled")

        threading.stack_size(1 << 20)
        thread = threading.Thread(target=compile)
        thread.start()
        thread.join()
    """
    chain = CHAINS["Lark"][1]
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, input=chain(depth), capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "compiled\n"), ended.stderr
