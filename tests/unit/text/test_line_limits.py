"""Line limits: answers that end at a line."""

from __future__ import annotations

import itertools

import pytest

from windlass.server.text.detokenizer import LineLimiter, LineLimits


def by_lines(text: str, indent: int) -> str:
    """Return all lines before the first one with too few blanks; the first line is not checked."""
    first, *others = text.split("\n")
    result = first
    for number, line in enumerate(others):
        blanks = len(line) - len(line.lstrip(" \t"))
        last = number == len(others) - 1
        if blanks < indent and not (last and blanks == len(line)):
            return result + "\n"
        result += "\n" + line
    return result


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
def test_indent(text: str, indent: int) -> None:
    cuts = [list(pair) for count in range(3) for pair in itertools.combinations(range(1, len(text)), count)]
    for cut in [*cuts, list(range(1, len(text)))]:
        limiter = LineLimiter(LineLimits(indent))
        pieces = [text[start:end] for start, end in zip([0, *cut], [*cut, len(text)], strict=True)]
        sent = "".join(limiter.feed(piece, 0.0) for piece in pieces) + limiter.flush()
        assert sent == by_lines(text, indent), cut
        assert limiter.ended is (sent != text), cut


def test_seconds() -> None:
    limiter = LineLimiter(LineLimits(seconds=1.0))
    assert limiter.feed("abc", 5.0) == "abc" and not limiter.ended
    assert limiter.feed("d\n  e", 0.5) == "d\n  e" and not limiter.ended
    assert limiter.feed("f", 1.5) == "f" and limiter.ended
    assert limiter.feed("g", 1.6) == "" and limiter.flush() == ""
