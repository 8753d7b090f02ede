"""Bounded cost of parameter types, which are computed on the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from windlass.server.text.stream_parser import CallArguments, CallOptions
from windlass.server.text.tool_parsers.formats import FORMATS

LOOP = {"$ref": "#/$defs/l"}
MOST = 10_000


class Counted(list[Any]):
    """List that counts the items read from it."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.seen += 1
            yield item


def arguments(schema: dict[str, Any], name: str = "a", value: str = "1", calls: int = 1) -> str:
    parser = FORMATS["qwen3_coder"].parser(CallOptions(schemas={"look": schema}, new_id=lambda: "call_0"))
    text = f"<function=look><parameter={name}>{value}</parameter></function>"
    events = [event for _ in range(calls) for event in parser.feed(text)] + parser.finish()
    return "".join(event.text for event in events if isinstance(event, CallArguments))


@pytest.mark.parametrize(
    ("key", "items"),
    [
        ("anyOf", [LOOP] + [1] * 60_000),
        ("anyOf", [1] * 60_000 + [LOOP]),
        ("oneOf", [LOOP, {"type": "string"}] * 30_000),
        ("allOf", [LOOP] + [1] * 60_000),
        ("enum", ["a"] * 60_000),
        ("type", ["string"] * 60_000),
    ],
)
def test_cost_of_long_lists_in_a_cycle(key: str, items: list[Any]) -> None:
    counted = Counted(items)
    loop = {"anyOf": [LOOP] * 200}  # refers to the list repeatedly
    schema = {"properties": {"a": LOOP}, "$defs": {"l": {**loop, key: counted}}}
    assert arguments(schema) == '{"a": 1}'
    assert counted.seen < MOST


def test_types_are_computed_once_for_all_calls() -> None:
    values = Counted(["1", "2"])
    assert arguments({"properties": {"a": {"enum": values}}}, calls=100) == '{"a": "1"}' * 100
    assert values.seen == len(values)


def test_type_keyword_with_a_list_that_is_too_long() -> None:
    many = [{"const": str(number)} for number in range(5000)]
    assert arguments({"properties": {"a": {"type": "string", "oneOf": many}}}) == '{"a": "1"}'
    assert arguments({"properties": {"a": {"enum": [str(number) for number in range(1000)]}}}) == '{"a": "1"}'
