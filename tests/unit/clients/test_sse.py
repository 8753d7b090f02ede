"""The event decoder against a plain reading of the standard, with the bytes cut anywhere."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.clients.sse import ServerSentEvent, SSEDecoder


def by_the_standard(data: bytes) -> list[ServerSentEvent]:
    """All at once: decode, drop the byte order mark, split into lines, interpret. Unfinished events are discarded."""
    lines = re.split("\r\n|\n|\r", data.decode("utf-8", "replace").removeprefix("\ufeff"))[:-1]
    events, fields, last = [], [], None
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
            events.append(ServerSentEvent("\n".join(texts), (kinds or [""])[-1] or "message", last))
        fields = []
    return events


def feed(data: bytes, cuts: list[int], **options: int) -> list[ServerSentEvent]:
    decoder = SSEDecoder(**options)
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [event for start, end in pairwise(edges) for event in decoder.feed(data[start:end])]


pieces = st.sampled_from(
    ["data: a", "data:b", "data:  c", "data", "data:", ": ping", "event: x", "event", "id: 7", "id: \0", "id", "retry: 5",
     "\n", "\n", "\r", "\r\n", "\n\n", "\r\n\r\n", "\ufeff", "é😀", "nonsense", "data: {\"a\": \"\u2028\"}", "\x0b", "\x85"]
)  # fmt: skip


@given(parts=st.lists(pieces, max_size=30), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_as_the_standard_reads_it(parts, cuts):
    data = "".join(parts).encode()
    assert feed(data, cuts) == by_the_standard(data)


@given(parts=st.lists(pieces, max_size=20))
def test_byte_by_byte(parts):
    data = "".join(parts).encode()
    assert feed(data, list(range(len(data)))) == by_the_standard(data)


def test_events_come_as_soon_as_they_are_complete():
    for ending in (b"\n\n", b"\r\r", b"\r\n\r"):
        assert [event.data for event in SSEDecoder().feed(b"data: x" + ending)] == ["x"]
    assert SSEDecoder().feed(b"data: x\n") == []


def test_huge_events_are_refused_and_endless_comments_are_not():
    with pytest.raises(ValueError, match="more than 100 bytes"):
        feed(b"data: " + b"x" * 200 + b"\n\n", [], max_event_bytes=100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        feed(b"data: x\n" * 50, list(range(0, 400, 3)), max_event_bytes=100)
    assert len(feed(b": keep-alive\n\n: ping\n" * 500 + b"data: x\n\n", [], max_event_bytes=100)) == 1
