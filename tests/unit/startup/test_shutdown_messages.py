"""The remaining time of running requests in words; other tests check with real servers that shutdown ends in time."""

from __future__ import annotations

import pytest

from windlass.server.startup.launch import describe_time_left


@pytest.mark.parametrize(
    ("requests", "seconds", "said"),
    [
        (1, 30.0, "1 request has 30 s to finish"),
        (1200, 3599.99, "1,200 requests have 3,600 s to finish"),
        (2, 0.52, "2 requests have 0.5 s to finish"),
        (2, -0.1, "2 requests have 0.0 s to finish"),
        (2, 1e9, "2 requests have unlimited time to finish"),
    ],
)
def test_remaining_time_in_words(requests: int, seconds: float, said: str) -> None:
    assert describe_time_left(requests, seconds) == said
