"""The event decoder compared with a plain implementation of the standard, with the bytes cut anywhere."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.clients.sse import SSEDecoder

Event = tuple[str, str, str]  # data, type, id


def by_the_standard(data: bytes) -> list[Event]:
    """Decode, drop the byte order mark, split into lines and interpret them. Unfinished events are discarded."""
    lines = re.split("\r\n|\n|\r", data.decode("utf-8", "replace").removeprefix("\ufeff"))[:-1]
    events, fields, last = [], [], ""
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            value = value[1:] if value.startswith(" ") else value
            if name == "id" and "\0" not in value:
                last = value
            fields.append((name, value))
            continue
        texts = [value for name, value in fields if name == "data"]
        kinds = [value for name, value in fields if name == "event"]
        if texts:
            events.append(("\n".join(texts), (kinds or [""])[-1] or "message", last))
        fields = []
    return events


def feed(data: bytes, cuts: list[int], **options: int) -> list[Event]:
    decoder = SSEDecoder(**options)
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    found = [event for start, end in pairwise(edges) for event in decoder.feed(data[start:end])]
    return [(event.data, event.event, event.id) for event in found]


pieces = st.sampled_from(
    ["data: a", "data:b", "data:  c", "data", "data:", ": ping", "event: x", "event", "id: 7", "id: \0", "id", "retry: 5",
     "\n", "\n", "\r", "\r\n", "\n\n", "\r\n\r\n", "\ufeff", "é😀", "nonsense", "data: {\"a\": \"\u2028\"}", "\x0b", "\x85"]
)  # fmt: skip


@given(parts=st.lists(pieces, max_size=30), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_decoder_follows_the_standard(parts, cuts):
    data = "".join(parts).encode()
    assert feed(data, cuts) == by_the_standard(data)


@given(parts=st.lists(pieces, max_size=20))
def test_decoder_accepts_single_bytes(parts):
    data = "".join(parts).encode()
    assert feed(data, list(range(len(data)))) == by_the_standard(data)


def test_events_are_returned_as_soon_as_they_are_complete():
    for ending in (b"\n\n", b"\r\r", b"\r\n\r"):
        assert [event.data for event in SSEDecoder().feed(b"data: x" + ending)] == ["x"]
    assert SSEDecoder().feed(b"data: x\n") == []


def test_large_events_are_refused_and_endless_comments_are_not():
    parts = [b"data: " + b"x" * 200 + b"\n\n", b"data: x\n" * 50, b"x" * 101]
    for data in parts:
        for cuts in ([], list(range(0, len(data), 3)), list(range(len(data)))):
            with pytest.raises(ValueError, match="more than 100 characters"):
                feed(data, cuts, max_event_chars=100)
    stream = b": keep-alive\n\n: ping\n" * 500 + b"data: x\n\n" + b"data: y\n\n" * 50
    for cuts in ([], list(range(0, len(stream), 7))):
        assert len(feed(stream, cuts, max_event_chars=100)) == 51
