"""Large responses: limited in size, written in pieces, without delays for other clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.eventually import in_time
from helpers.live_server import live_server
from helpers.probing import watched
from helpers.real_server import RealServer, serve
from helpers.scripted_engine import logprobs_of
from helpers.writer_jobs import writer_job

from windlass.server.api.chat import ChatWriter
from windlass.server.api.completions import CompletionWriter
from windlass.server.errors import ApiError
from windlass.server.serving.deltas import Delta, TokenUsage
from windlass.server.text.service import Prompt

PROMPTS = [[300 + (7 * row + column) % 3000 for column in range(500)] for row in range(256)]
MIB = 2**20


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with serve() as server:
        yield server


def post(server: RealServer, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=300)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_above_the_limit_is_refused_with_both_numbers(stream: bool) -> None:
    """The log-probabilities of prompts are collected for the first events of a stream, too."""
    with live_server(max_response_bytes=2000) as live:
        body = {
            "prompt": [ids[:40] for ids in PROMPTS[:4]],
            "max_tokens": 1,
            "echo": True,
            "logprobs": 20,
            "prompt_logprobs": 20,
        }
        error = live.refuse("/v1/completions", body | {"stream": stream})
        assert error["code"] == "response_too_large"
        size, most = map(int, re.findall(r"\d{4,}", error["message"]))
        assert most == 2000 < size


def test_the_limit_is_the_operators() -> None:
    with live_server(max_response_bytes=2000) as live:
        live.complete(max_tokens=200)
        body = {"prompt": "x", "max_tokens": 200, "logprobs": 1}
        assert live.refuse("/v1/completions", body)["code"] == "response_too_large"
        assert live.stream("/v1/completions", body)[-1] == "[DONE]"
        assert "limit of 2000" in live.refuse("/tokenize", {"prompt": "hello " * 200})["message"]
        assert "limit of 2000" in live.refuse("/detokenize", {"tokens": [65] * 1000})["message"]


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


def attack(server: RealServer, rows: int, stream: bool) -> tuple[Any, int]:
    body = {"prompt": PROMPTS[:rows], "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    raw = json.dumps(body).encode()
    with watched(server.url) as found:
        response = httpx.post(server.url + "/v1/completions", content=raw, timeout=300)
        size = len(response.content)
    assert response.status_code == 200
    return found, size


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_large_answer_delays_no_other_request(real: RealServer, stream: bool) -> None:
    def longest() -> float:
        """Longest gap in seconds, or twice the duration of /health, which has half the time."""
        found, size = attack(real, 32, stream)
        assert size > 8 * MIB
        assert not found.bad
        return max(found.worst_gap, 2 * found.worst_health)

    in_time(longest, 2.0)


@pytest.mark.soak
@pytest.mark.parametrize("stream", [False, True])
def test_largest_answer_delays_no_other_request(stream: bool) -> None:
    with serve() as server:
        found, size = attack(server, 180, stream)
        print(size, found.gaps[:3], found.health[:3])
        assert size > 45 * MIB
        assert not found.bad
        assert found.worst_health <= 0.25
        # The engine's own steps are part of a gap: log-probabilities of 2,048 tokens with 20 alternatives.
        assert found.worst_gap <= 0.75
