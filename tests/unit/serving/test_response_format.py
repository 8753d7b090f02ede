"""Responses written in pieces: JSON, log-probabilities, the best of several samples, and the size limit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from helpers.live_server import toy_tokenizer
from helpers.scripted_engine import logprobs_of
from helpers.writer_jobs import writer_job
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.interface.outputs import TokenLogprobs
from windlass.server.api.chat import ChatWriter
from windlass.server.api.completions import CompletionWriter
from windlass.server.errors import ApiError
from windlass.server.serving.job import Delta, TokenUsage
from windlass.server.serving.response_writer import CompletionLogprobLists, JsonList, encode, encode_pieces
from windlass.server.text.service import Prompt

LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    LEAVES | st.text(), lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5)
)


@given(VALUES)
def test_any_value_is_read_back(value: Any) -> None:
    assert json.loads(encode(value)) == value


@pytest.mark.slow
@given(st.lists(st.lists(VALUES, max_size=4), max_size=6))
def test_list_extended_in_parts_equals_a_list(parts: list[list[Any]]) -> None:
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


def test_minus_infinity_is_sent_as_a_number() -> None:
    layout = CompletionLogprobLists(toy_tokenizer(), 2, skip_special_tokens=True)
    entry = TokenLogprobs(65, -math.inf, 300, ((66, 0.0), (67, math.nan)))
    assert layout.layout([65], [entry])["top_logprobs"] == [{"c": 0.0, "d": -9999.0, "b": -9999.0}]


def test_best_of_ranks_by_logprob_per_token() -> None:
    writer = CompletionWriter(writer_job(samples=3), [Prompt([1])], TokenUsage())
    for choice, token in enumerate((1, 2, 3)):  # 2 is the more likely of its pair
        writer.add(Delta(choice, f"t{token}", (token,), (logprobs_of(token, 0),), "stop"))
    (best,) = writer.answer()["choices"]
    assert (best["text"], best["index"]) == ("t2", 0)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_response_that_grows_past_the_limit_is_ended(logprobs: int | None) -> None:
    job = writer_job(max_response_bytes=1000, logprobs=logprobs)
    ids = tuple(job.state.tokenizer.encode("hello", add_special_tokens=False))
    entries = () if logprobs is None else tuple(logprobs_of(token_id, 2) for token_id in ids)
    for writer in (
        CompletionWriter(job, [Prompt([1])], TokenUsage()),
        ChatWriter(job, [Prompt([1])], TokenUsage()),
    ):
        with pytest.raises(ApiError, match="limit of 1000") as caught:
            for _ in range(1000):
                writer.add(Delta(0, "hello", ids, entries))
        assert caught.value.status == 400 and caught.value.code == "response_too_large"
        assert len(b"".join(writer.pieces())) < 2000
