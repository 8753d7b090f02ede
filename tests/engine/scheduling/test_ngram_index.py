"""The n-gram index against a search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.scheduling.speculation import NgramIndex


def by_search(tokens: list[int], shortest: int, longest: int, count: int) -> tuple[int, ...]:
    """The continuation of the longest earlier match with the end, the latest among equals."""
    for n in range(longest, shortest - 1, -1):
        if len(tokens) <= n:
            continue
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[len(tokens) - n :]:
                text = list(tokens)
                while len(text) < place + count:
                    text.append(text[place + len(text) - len(tokens)])
                return tuple(text[place : place + count])
    return ()


@given(
    # At most 16 earlier positions per run of tokens, which is the limit of the index.
    tokens=st.lists(st.integers(0, 3), max_size=17),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 9),
    pieces=st.integers(1, 5),
)
def test_index_equals_a_search_for_any_arrival_of_text(
    tokens: list[int], shortest: int, more: int, count: int, pieces: int
) -> None:
    index = NgramIndex(shortest, shortest + more)
    for end in range(len(tokens) + 1):
        while not index.extend(tokens[:end], pieces):
            pass
        assert index.propose(tokens[:end], count) == by_search(tokens[:end], shortest, shortest + more, count)


def test_long_text_is_indexed_in_parts() -> None:
    index, tokens = NgramIndex(2, 4), list(range(1000)) * 2
    rounds = 1
    while not index.extend(tokens, 300):
        rounds += 1
    assert rounds == 7
    assert index.propose(tokens, 3) == (0, 1, 2)
    assert index.propose([*tokens, 5000], 3) == ()


def test_short_loop_is_continued() -> None:
    index, tokens = NgramIndex(1, 3), [9, 9, 7, 8, 7, 8, 7]
    assert index.extend(tokens, 100)
    assert index.propose(tokens, 5) == (8, 7, 8, 7, 8)
    assert index.propose(tokens, 0) == ()


def test_search_over_equal_positions_is_limited() -> None:
    """Only the last sixteen positions are compared: an older one with a longer match is ignored."""
    tokens = [1, 2, 3, 4] + [5, 3, 6] * 20 + [1, 2, 3]
    index = NgramIndex(1, 3)
    assert index.extend(tokens, 1000)
    assert index.propose(tokens, 1) == (6,)
    assert NgramIndex(2, 3).extend(tokens, 1000)
