"""A stop string that one of several samples meets, over a real server: that sample ends at once and the others go on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from helpers.real_server import RealServer, serve

TOKENS = 300


def complete(server: RealServer, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "The ", "max_tokens": TOKENS, "n": 2, "seed": 3, "ignore_eos": True, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def first_words_of_one(texts: list[str]) -> tuple[int, str]:
    """A sample and a piece of its beginning that the other one never writes."""
    for index, text in enumerate(texts):
        for start in range(20, 100):
            piece = text[start : start + 6]
            if piece not in texts[1 - index] and text.index(piece) == start:
                return index, piece
    raise AssertionError("both samples write the same")


@pytest.mark.slow
def test_one_sample_ends_and_the_other_goes_on() -> None:
    with serve("--kv-cache-memory", "64MiB", "--deterministic") as server:
        texts = [choice["text"] for choice in complete(server)["choices"]]
        assert server.metric("windlass_generation_tokens_total") == 2 * TOKENS
        index, stop = first_words_of_one(texts)
        for _ in range(8):  # on a busy machine the engine may be done before the server has seen the words
            before = server.metric("windlass_generation_tokens_total")
            answer = complete(server, stop=stop)
            ended, other = answer["choices"][index], answer["choices"][1 - index]
            assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
            assert ended["text"] == texts[index].partition(stop)[0]
            assert (other["finish_reason"], other["text"]) == ("length", texts[1 - index])
            computed = server.metric("windlass_generation_tokens_total") - before
            if computed < TOKENS + 150:
                break
        # The ended sample has computed a few tokens and then no more.
        assert computed < TOKENS + 150
        assert server.metric("windlass_kv_cache_usage_perc") == 0
