"""Arguments of calls with lone surrogates, as a model may write them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.server.api.messages import _arguments_object
from windlass.server.schemas.tools import check_arguments, parse_arguments, replace_lone_surrogates


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ude00", "\ufffd"),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00!", "\ufffd\U0001f600!"),
        (r"\\ud83d", "\\ud83d"),
        (r"\\\ud83d\u0041", "\\\ufffdA"),
        (r"\"\ud7ff\ue000", '"\ud7ff\ue000'),
    ],
)
def test_lone_surrogates_are_replaced(written: str, read: str) -> None:
    text = f'{{"a": "{written}", "b{written}": [1]}}'
    assert parse_arguments(text) == _arguments_object(text) == {"a": read, f"b{read}": [1]}
    assert check_arguments(text) == text  # as it was sent


@given(st.text(st.sampled_from('a"\\\u00e9\U0001f600\ud83d\ude00\ud800\udfff')))
def test_other_text_is_unchanged(text: str) -> None:
    written = json.dumps(text)
    found = json.loads(replace_lone_surrogates(written))
    halves = {i for i, character in enumerate(json.loads(written)) if "\ud800" <= character <= "\udfff"}
    assert found == "".join("\ufffd" if i in halves else c for i, c in enumerate(json.loads(written)))
