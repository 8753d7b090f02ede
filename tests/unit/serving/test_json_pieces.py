"""JSON encoded in pieces equals JSON encoded at once."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from windlass.server.serving.response_format import JsonList, encode, encode_pieces

LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    LEAVES | st.text(), lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5)
)


@given(VALUES)
def test_any_value(value: Any) -> None:
    assert json.loads(encode(value)) == value


@given(st.lists(st.lists(VALUES, max_size=4), max_size=6))
def test_a_list_extended_in_parts(parts: list[list[Any]]) -> None:
    found = JsonList()
    for part in parts:
        found.extend(part)
    items = [item for part in parts for item in part]
    assert json.loads(encode({"a": [{"b": found}], "c": 1})) == {"a": [{"b": items}], "c": 1}
    assert json.loads(encode(found + found)) == items + items
    assert bool(found) == bool(items)
    assert len(encode(found)) == (found.size + 1 if items else 2)


def test_pieces_are_small() -> None:
    found = JsonList()
    for _ in range(1000):
        found.extend(["x" * 100] * 256)
    assert max(map(len, encode_pieces({"many": found}))) < 30_000
