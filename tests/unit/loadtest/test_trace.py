"""Traces: their fields, their order, and one error line that names file and line."""

from __future__ import annotations

import json

import pytest

from windlass.clients.loadtest.load_plan import read_trace
from windlass.clients.loadtest.target import LoadTestError

GOOD = {"timestamp": 1.0, "input_len": 10, "max_tokens": 4}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write


def test_every_field_is_read_and_requests_come_by_time(write):
    yarn = {"rope_type": "yarn", "factor": 2}
    path = write(
        {"timestamp": 2.5, "prompt": [1, 2, 3], "max_tokens": 7, "rope_scaling": yarn},
        "",
        {"timestamp": 1, "prompt": "hello", "output_length": 3, "rope_scaling": None},
        {"timestamp": 0, "input_length": 9, "output_tokens": 5},
    )
    first, second, third = read_trace(path)
    assert (first.timestamp, first.input_len, first.prompt, first.max_tokens) == (0, 9, None, 5)
    assert (second.prompt, second.rope_scaling, second.has_scaling) == ("hello", None, True)
    assert (third.prompt, third.rope_scaling, third.has_scaling) == ((1, 2, 3), yarn, True)
    assert [entry.line for entry in (first, second, third)] == [4, 3, 1]
    assert not first.has_scaling


def test_a_trace_may_have_no_times(write):
    path = write({"input_len": 5, "max_tokens": 1}, {"input_len": 6, "max_tokens": 1})
    assert [(entry.timestamp, entry.input_len) for entry in read_trace(path)] == [(None, 5), (None, 6)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "line 2"),
        ("3", "should be an object"),
        ({**GOOD, "timestamp": "soon"}, "timestamp should be a number"),
        ({**GOOD, "timestamp": True}, "timestamp should be a number"),
        ('{"timestamp": NaN, "input_len": 1, "max_tokens": 1}', "timestamp should be a number"),
        ({**GOOD, "input_len": 0}, "input_len should be a whole number"),
        ({**GOOD, "input_len": 1.5}, "input_len should be a whole number"),
        ({**GOOD, "max_tokens": -1}, "max_tokens should be a whole number"),
        ({"timestamp": 1, "input_len": 10}, "no max_tokens"),
        ({"timestamp": 1, "max_tokens": 1}, "a prompt or an input_len"),
        ({**GOOD, "prompt": "x"}, "a prompt or an input_len"),
        ({"timestamp": 1, "max_tokens": 1, "prompt": []}, "prompt should be text"),
        ({"timestamp": 1, "max_tokens": 1, "prompt": [1, -2]}, "prompt should be text"),
        ({**GOOD, "input_length": 3}, "input_len twice"),
        ({**GOOD, "rope_scalling": None}, "unknown field 'rope_scalling'"),
        ({**GOOD, "rope_scaling": 4}, "rope_scaling should be a JSON object"),
        ({"input_len": 10, "max_tokens": 4}, "has no timestamp unlike line 1"),
    ],
)
def test_a_bad_line_is_named(write, line, message):
    path = write(GOOD, line, GOOD)
    with pytest.raises(LoadTestError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}, line 2: ") and message in text and "\n" not in text


def test_a_trace_that_is_empty_or_not_there_is_an_error(write, tmp_path):
    for path in (write(""), tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(LoadTestError) as caught:
            read_trace(path)
        assert str(path) in str(caught.value)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(LoadTestError):
        read_trace(binary)
