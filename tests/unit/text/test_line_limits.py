"""Answers that end by their lines."""

from __future__ import annotations

import itertools

import pytest

from windlass.server.text.detokenizer import LineLimiter, LineLimits


def by_lines(text: str, indent: int) -> str:
    """What stays: all lines up to the first, behind the first one, that begins with too few blanks."""
    first, *others = text.split("\n")
    kept = first
    for number, line in enumerate(others):
        blanks = len(line) - len(line.lstrip(" \t"))
        last = number == len(others) - 1
        if blanks < indent and not (last and blanks == len(line)):
            return kept + "\n"
        kept += "\n" + line
    return kept


TEXTS = [
    "",
    "a",
    "a\n",
    "a\n  b\nc\n",
    "\n\nx",
    "a\n  b\n \n  c",
    "a\n\tb\n\t\tc\nd",
    "a\n   ",
    "a\n  b\n  c\n\n  d",
    "  \nx",
]


@pytest.mark.parametrize("indent", [1, 2, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_however_the_text_comes_the_same_lines_stay(text: str, indent: int) -> None:
    cuts = [list(pair) for count in range(3) for pair in itertools.combinations(range(1, len(text)), count)]
    for cut in [*cuts, list(range(1, len(text)))]:
        watch = LineLimiter(LineLimits(indent))
        pieces = [text[start:end] for start, end in zip([0, *cut], [*cut, len(text)], strict=True)]
        sent = "".join(watch.feed(piece, 0.0) for piece in pieces) + watch.flush()
        assert sent == by_lines(text, indent), cut
        assert watch.ended is (sent != text), cut


def test_time_ends_an_answer_that_has_a_whole_line() -> None:
    watch = LineLimiter(LineLimits(seconds=1.0))
    assert watch.feed("abc", 5.0) == "abc" and not watch.ended
    assert watch.feed("d\n  e", 0.5) == "d\n  e" and not watch.ended
    assert watch.feed("f", 1.5) == "f" and watch.ended
    assert watch.feed("g", 1.6) == "" and watch.flush() == ""
