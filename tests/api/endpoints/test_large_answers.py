"""The largest possible answers: estimated, limited, rendered in pieces, without delaying other requests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.eventually import in_time
from helpers.live_server import live_server, toy_tokenizer
from helpers.probing import watched
from helpers.real_server import RealServer, serve
from helpers.scripted_engine import logprobs_of

from windlass.server.api.chat import ChatWriter
from windlass.server.api.completions import CompletionWriter
from windlass.server.errors import ApiError
from windlass.server.serving.deltas import Delta, TokenUsage
from windlass.server.serving.response_writer import ResponseOptions, estimate_bytes
from windlass.server.text.service import Prompt

PROMPTS = [[300 + (7 * row + column) % 3000 for column in range(500)] for row in range(256)]
MIB = 2**20


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with serve() as server:
        yield server


def post(server: RealServer, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=300)


SHAPES: list[dict[str, Any]] = [
    {"prompt": PROMPTS[:3], "max_tokens": 0, "echo": True, "logprobs": 20},
    {"prompt": PROMPTS[:3], "max_tokens": 0, "echo": True, "logprobs": 2},
    {"prompt": PROMPTS[:2], "max_tokens": 1, "prompt_logprobs": 20},
    {"prompt": PROMPTS[:2], "max_tokens": 1, "prompt_logprobs": 1, "n": 3, "return_token_ids": True},
    {"prompt": "In the beginning", "max_tokens": 300, "logprobs": 20, "n": 2},
    {"prompt": "In the beginning", "max_tokens": 300, "n": 4},
    {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "logprobs": True, "top_logprobs": 20},
]


@pytest.mark.parametrize("shape", [pytest.param(SHAPES[0], marks=pytest.mark.slow), *SHAPES[1:]])
def test_estimate_slightly_exceeds_the_answer(real: RealServer, shape: dict[str, Any]) -> None:
    chat = "messages" in shape
    answer = post(real, {"ignore_eos": True, **shape}, "/v1/chat/completions" if chat else "/v1/completions")
    assert answer.status_code == 200
    n = shape.get("n", 1)
    options = ResponseOptions(
        n=n,
        samples=n,
        logprobs=shape.get("top_logprobs" if chat else "logprobs"),
        prompt_logprobs=shape.get("prompt_logprobs"),
        return_token_ids=shape.get("return_token_ids", False),
    )
    usage = answer.json()["usage"]
    prompts = (
        [len(ids) for ids in shape["prompt"]] if isinstance(shape.get("prompt"), list) else [usage["prompt_tokens"]]
    )
    lengths = [(tokens, shape["max_tokens"]) for tokens in prompts]
    estimate = estimate_bytes(options, lengths, chat=chat, echo=bool(shape.get("echo")), stream=False)
    envelope = 700  # id, rotary report, usage
    assert 0.95 < (estimate + envelope) / len(answer.content) < 1.8


def test_possibly_too_large_answer_is_refused_with_both_numbers(real: RealServer) -> None:
    """A body under 1 MiB with 256 prompts of 500 tokens, each with 20 alternatives, twice: 260 MB."""
    body = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
    assert len(json.dumps(body)) < MIB
    for stream in (False, True):
        begin = time.monotonic()
        response = post(real, body | {"stream": stream})
        assert time.monotonic() - begin < 10  # it took 31 s to build
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "response_too_large"
        size, most = map(int, re.findall(r"\d{4,}", error["message"]))
        assert most == 64 * MIB and 200 * MIB < size < 400 * MIB


def test_operator_sets_the_limit() -> None:
    with live_server(max_response_bytes=2000) as live:
        live.complete(max_tokens=200)
        assert live.refuse("/v1/completions", {"prompt": "x", "max_tokens": 200, "logprobs": 1})["code"] == (
            "response_too_large"
        )
        assert live.stream("/v1/completions", {"prompt": "x", "max_tokens": 200, "logprobs": 1})[-1] == "[DONE]"
        assert "max-response-bytes" in live.refuse("/tokenize", {"prompt": "hello " * 200})["message"]
        assert "max-response-bytes" in live.refuse("/detokenize", {"tokens": [65] * 1000})["message"]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_answer_beyond_its_estimate_is_ended(logprobs: int | None) -> None:
    options = ResponseOptions(max_bytes=1000, logprobs=logprobs)
    tokenizer = toy_tokenizer()
    ids = tuple(tokenizer.encode("hello", add_special_tokens=False))
    entries = () if logprobs is None else tuple(logprobs_of(token_id, 2) for token_id in ids)
    for writer in (
        CompletionWriter(tokenizer, [Prompt([1])], TokenUsage(), options, {}),
        ChatWriter(tokenizer, [Prompt([1])], TokenUsage(), options, {}),
    ):
        with pytest.raises(ApiError, match="has grown to") as caught:
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
