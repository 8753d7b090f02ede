"""Thousands of seeded bodies, mutated from valid ones and from nonsense: no 5xx, no hang, and the server keeps running."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import httpx
import pytest
from helpers.eventually import in_time
from helpers.live_server import live_server, parse_events
from helpers.mutations import ITEM_TEMPLATES, PROMPT_TEMPLATES, TEMPLATES, Mutator
from helpers.toy_tokenizers import taught

from windlass.engine.rotary.rope_scaling import RopeScaling

SEED = 20261121


def ends_well(text: str) -> bool:
    """Whether a stream ended properly, without a hidden 5xx."""
    if "event: " not in text:
        events = parse_events(text)
        return events[-1] == "[DONE]" and not any(isinstance(event, dict) and "error" in event for event in events)
    names = re.findall(r"^event: (.*)$", text, re.MULTILINE)
    return names[-1] in ("response.completed", "response.incomplete", "message_stop") and "error" not in names


def posted(http: httpx.Client, path: str, body: bytes) -> httpx.Response:
    """The response, which must arrive in time."""
    answers: list[httpx.Response] = []

    def seconds() -> float:
        begin = time.monotonic()
        answers.append(http.post(path, content=body))
        return time.monotonic() - begin

    in_time(seconds, 5)
    return answers[-1]


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("templates", "bodies"),
    [
        pytest.param(TEMPLATES, 300, id="texts"),
        pytest.param(TEMPLATES, 4000, id="more texts", marks=pytest.mark.slow),
        pytest.param(ITEM_TEMPLATES, 100, id="items"),
        pytest.param(ITEM_TEMPLATES, 600, id="more items", marks=pytest.mark.slow),
        pytest.param(PROMPT_TEMPLATES, 600, id="prompts", marks=pytest.mark.slow),
    ],
)
def test_thousands_of_bodies(templates: list[tuple[str, dict[str, Any]]], bodies: int) -> None:
    mutator = Mutator(random.Random(SEED))
    statuses: dict[int, int] = {}
    profiles = {"long": RopeScaling.from_dict({"rope_type": "linear", "factor": 2})}
    backend = taught(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
    with live_server(backend=backend, rope_profiles=profiles, rope_exact=True) as live:
        for number in range(bodies):
            path, template = mutator.rng.choice(templates)
            body = mutator.body(template)
            try:
                response = posted(live.http, path, body)
            except (httpx.HTTPError, AssertionError) as error:
                raise AssertionError(f"body {number} to {path} got no answer: {error!r}\n{body[:2000]!r}") from error
            context = f"body {number} to {path}: {response.status_code} {response.text[:500]}\n{body[:2000]!r}"
            assert response.status_code in (200, 400, 404), context
            assert response.headers["x-request-id"], context
            if response.status_code != 200:
                error = response.json()["error"]
                assert error["message"] and len(response.content) < 4000, context
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert ends_well(response.text), context
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            if number % 250 == 0:
                assert live.complete("still here", max_tokens=1)["choices"][0]["text"] == "b"
        assert live.complete("still here", max_tokens=1)["choices"][0]["text"] == "b"
        live.wait(lambda: live.engine.running == 0 and live.state.in_flight == 0)
    # The mutations must neither all fail nor all pass, or they would test little.
    assert statuses[200] > bodies // 10 and statuses[400] > bodies * 2 // 5, statuses


def test_random_bytes_on_the_wire() -> None:
    import socket

    rng = random.Random(SEED)
    with live_server() as live:
        url = httpx.URL(live.url)
        for _ in range(100):
            head = rng.choice(
                [b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n", b"\x16\x03\x01"]
            )
            with socket.create_connection((url.host, url.port), timeout=30) as connection:
                connection.sendall(head + rng.randbytes(rng.randrange(200)) + b"\r\n\r\n")
        live.complete(max_tokens=1)
