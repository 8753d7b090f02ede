"""Typical cases of KV reuse: prompts whose early tokens change and whose later passages are reused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.real_server import RealServer, serve

REUSE = {"cache_reuse": 32, "temperature": 0, "max_tokens": 8}
STORY = [" ".join(f"{word} {number}" for number in range(24)) for word in ("river", "stone", "cloud", "field", "tower")]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--max-model-len", "2048") as server:
        server.wait_ready()
        yield server


def post(server: RealServer, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def reused(answer: dict[str, Any]) -> tuple[int, int]:
    """Number of tokens reused after the common prefix, and number of prompt tokens."""
    return answer["rotary"]["context"]["reused_tokens"], answer["usage"]["prompt_tokens"]


def said(*texts: str, system: str = "You tell stories.") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": system},
        *({"role": roles[number % 2], "content": text} for number, text in enumerate(texts)),
    ]


def test_an_edited_history(server: RealServer) -> None:
    salt = {"cache_salt": "history"}
    post(server, "chat/completions", messages=said(*STORY), **REUSE, **salt)
    edited = said("Something else altogether.", *STORY[1:])
    tokens, prompt = reused(post(server, "chat/completions", messages=edited, **REUSE, **salt))
    assert tokens > prompt / 2
    shortened = said(*STORY[2:])  # without its first question and answer
    tokens, prompt = reused(post(server, "chat/completions", messages=shortened, **REUSE, **salt))
    assert tokens > prompt / 2


def test_the_next_turn_of_such_a_chat(server: RealServer) -> None:
    salt = {"cache_salt": "turns"}
    post(server, "chat/completions", messages=said(*STORY), **REUSE, **salt)
    edited = said("Another beginning, longer than before.", *STORY[1:])
    answer = post(server, "chat/completions", messages=edited, **REUSE, **salt)
    assert reused(answer)[0] > 0
    text = answer["choices"][0]["message"]["content"]
    following = [*edited, {"role": "assistant", "content": text}, {"role": "user", "content": STORY[0]}]
    tokens, _ = reused(post(server, "chat/completions", messages=following, **REUSE, **salt))
    assert tokens >= reused(answer)[0]
    last = [*following, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And then?"}]
    tokens, prompt = reused(post(server, "chat/completions", messages=last, **REUSE, **salt))
    assert tokens > prompt / 2


def test_a_changed_tool_list(server: RealServer) -> None:
    """Templates place the descriptions of tools before the chat."""
    salt = {"cache_salt": "tools"}
    one, two = ("You may call weather(city).", "You may call weather(city), news(topic) and search(words, count).")
    post(server, "chat/completions", messages=said(*STORY, system=one), **REUSE, **salt)
    tokens, prompt = reused(post(server, "chat/completions", messages=said(*STORY, system=two), **REUSE, **salt))
    assert tokens > prompt / 2


def test_an_agent_that_rewrites_its_first_line(server: RealServer) -> None:
    salt, notes = {"cache_salt": "agent"}, " ".join(STORY)
    post(server, "completions", prompt=f"Step 1 of many. {notes} Next:", **REUSE, **salt)
    for step, state in ((2, "idle"), (3, "reading the third file"), (4, "done")):
        head = f"Step {step}, state: {state}, {17 * step} lines. "
        tokens, prompt = reused(post(server, "completions", prompt=f"{head}{notes} Next:", **REUSE, **salt))
        assert tokens > prompt / 2


def test_documents_in_every_order(server: RealServer) -> None:
    salt = {"cache_salt": "orders"}
    for text in STORY:
        post(server, "completions", prompt=f"Read this: {text}", **REUSE, **salt)
    for turn in range(len(STORY)):
        order = STORY[turn:] + STORY[:turn]
        body = {"prompt": f"Question {turn}. {' '.join(order)} Which is the longest?", **REUSE, **salt}
        tokens, prompt = reused(post(server, "completions", **body))
        assert tokens > prompt / 2
