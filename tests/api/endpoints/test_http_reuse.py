"""Non-prefix KV reuse: the fields, and a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import httpx
import pytest
from helpers.live_server import Live, live_server, server_fixture
from helpers.real_server import RealServer, serve

from windlass.clients.types import ContextUse
from windlass.engine.interface.context import MIN_PASSAGE_TOKENS, NonPrefixReuseParams
from windlass.server.serving.job import DEFAULT_RECOMPUTE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
shared = server_fixture(default_max_tokens=20)


def asked(live: Live, **fields: Any) -> NonPrefixReuseParams | None:
    live.complete("a b c", max_tokens=3, **fields)
    return live.engine.requests[-1].reuse


def test_fields_reach_the_engine(live: Live) -> None:
    assert asked(live) == NonPrefixReuseParams(0, (), 0.15, "")  # its passages can be reused
    assert asked(live, cache_reuse=64) == NonPrefixReuseParams(64, (), 0.15, "")
    assert asked(live, cache_reuse=64, cache_reuse_recompute=0.3, cache_salt="s") == NonPrefixReuseParams(
        64, (), 0.3, "salt s"
    )
    spans = [{"start": 0, "end": 2}, {"start": 2, "end": 3}]
    assert asked(live, passages=spans, cache_reuse_recompute=8) == NonPrefixReuseParams(0, ((0, 2), (2, 3)), 8.0, "")


def test_passages_are_shared_among_requests_of_one_key() -> None:
    with live_server(api_keys=("one", "two"), cache_reuse=48) as live:
        scopes = []
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            live.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}, headers=headers).raise_for_status()
            reuse = live.engine.requests[-1].reuse
            assert reuse is not None and reuse.at_least == 48
            scopes.append(reuse.scope)
        assert scopes[0] == scopes[2] != scopes[1] and "one" not in scopes[0]


def test_openapi_describes_context_fields_of_requests_and_responses(live: Live) -> None:
    schemas = live.http.get("/openapi.json").json()["components"]["schemas"]
    settings = schemas["ContextSettings"]["properties"]
    asked = (*(name for name in settings if schemas["CompletionRequest"]["properties"].get(name)),)
    assert len(asked) == 5
    for request in ("CompletionRequest", "ChatRequest", "ResponseRequest", "MessageRequest"):
        of = schemas[request]["properties"]
        for name in asked:  # each names the place of its default, which exists
            assert f"`context.{name}`" in of[name]["description"], (request, name)
        assert f"at least {MIN_PASSAGE_TOKENS}" in of["cache_reuse"]["description"]
        assert of["cache_reuse_recompute"]["description"].endswith(f"Default: {DEFAULT_RECOMPUTE}.")
        assert "Only for completions" in of["passages"]["description"]
    told = schemas["ContextUse"]["properties"]
    assert set(told) == {field.name for field in fields(ContextUse)}
    assert schemas["Rotary"]["properties"]["context"]["anyOf"][0]["$ref"].endswith("/ContextUse")
    for described in (told, settings, schemas["PassageSpan"]["properties"]):
        assert all(len(field.get("description", "")) > 15 for field in described.values()), described


# -- a real engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--max-model-len", "2048") as server:
        server.wait_ready()
        yield server


def ask(server: RealServer, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    response = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


DOCUMENTS = [" ".join(f"{word} {number}" for number in range(40)) for word in ("river", "stone", "cloud")]


@pytest.mark.slow
def test_reordered_documents_are_reused_from_the_cache(server: RealServer) -> None:
    first, second, third = DOCUMENTS
    ask(server, f"Documents: {first} {second} {third} What are they about?")
    turned = f"Other documents: {third} {first} {second} Which is the longest?"
    assert cached(ask(server, turned, cache_salt="x")) == 0  # another salt's
    answer = ask(server, turned, cache_reuse=32, cache_reuse_recompute=0)
    context, prompt = answer["rotary"]["context"], answer["usage"]["prompt_tokens"]
    assert context["reused_passages"] >= 2 and context["reused_tokens"] > prompt / 2
    assert cached(answer) >= context["reused_tokens"]
    assert server.metric("windlass_reused_tokens_total") == context["reused_tokens"]
    heads = ask(server, turned + " Now?", cache_reuse=32, cache_salt=None)
    assert heads["usage"]["prompt_tokens"] > prompt


@pytest.mark.slow
def test_spans_outside_the_prompt_or_overlapping_are_refused(server: RealServer) -> None:
    for spans in ([{"start": 0, "end": 10**6}], [{"start": 0, "end": 60}, {"start": 50, "end": 90}]):
        body = {"prompt": DOCUMENTS[0], "max_tokens": 2, "passages": spans}
        response = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "passages" and error["code"], error
    assert ask(server, DOCUMENTS[0], passages=[{"start": 0, "end": 60}])["choices"]


@pytest.mark.slow
def test_deterministic_server_refuses_reuse() -> None:
    with serve("--deterministic") as server:
        server.wait_ready()
        response = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "cache_reuse": 64}, timeout=60)
        assert response.status_code == 400 and response.json()["error"]["param"] == "cache_reuse"
        assert httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a"}, timeout=60).status_code == 200


REUSE = {"cache_reuse": 32, "temperature": 0, "max_tokens": 8}
STORY = [" ".join(f"{word} {number}" for number in range(24)) for word in ("river", "stone", "cloud", "field", "tower")]


def post(server: RealServer, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def reused(answer: dict[str, Any]) -> tuple[int, int]:
    """Number of tokens reused after the common prefix, and number of prompt tokens."""
    return answer["rotary"]["context"]["reused_tokens"], answer["usage"]["prompt_tokens"]


def conversation(*texts: str, system: str = "You tell stories.") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": system},
        *({"role": roles[number % 2], "content": text} for number, text in enumerate(texts)),
    ]


def test_an_edited_history(server: RealServer) -> None:
    salt = {"cache_salt": "history"}
    post(server, "chat/completions", messages=conversation(*STORY), **REUSE, **salt)
    edited = conversation("Something else altogether.", *STORY[1:])
    tokens, prompt = reused(post(server, "chat/completions", messages=edited, **REUSE, **salt))
    assert tokens > prompt / 2
    shortened = conversation(*STORY[2:])  # without its first question and answer
    tokens, prompt = reused(post(server, "chat/completions", messages=shortened, **REUSE, **salt))
    assert tokens > prompt / 2


@pytest.mark.slow
def test_the_next_turn_of_such_a_chat(server: RealServer) -> None:
    salt = {"cache_salt": "turns"}
    post(server, "chat/completions", messages=conversation(*STORY), **REUSE, **salt)
    edited = conversation("Another beginning, longer than before.", *STORY[1:])
    answer = post(server, "chat/completions", messages=edited, **REUSE, **salt)
    assert reused(answer)[0] > 0
    text = answer["choices"][0]["message"]["content"]
    following = [*edited, {"role": "assistant", "content": text}, {"role": "user", "content": STORY[0]}]
    tokens, _ = reused(post(server, "chat/completions", messages=following, **REUSE, **salt))
    assert tokens >= reused(answer)[0]
    last = [*following, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And then?"}]
    tokens, prompt = reused(post(server, "chat/completions", messages=last, **REUSE, **salt))
    assert tokens > prompt / 2


@pytest.mark.slow
def test_a_changed_tool_list(server: RealServer) -> None:
    """Templates place the descriptions of tools before the chat."""
    salt = {"cache_salt": "tools"}
    one, two = ("You may call weather(city).", "You may call weather(city), news(topic) and search(words, count).")
    post(server, "chat/completions", messages=conversation(*STORY, system=one), **REUSE, **salt)
    tokens, prompt = reused(
        post(server, "chat/completions", messages=conversation(*STORY, system=two), **REUSE, **salt)
    )
    assert tokens > prompt / 2


@pytest.mark.slow
def test_an_agent_that_rewrites_its_first_line(server: RealServer) -> None:
    salt, notes = {"cache_salt": "agent"}, " ".join(STORY)
    post(server, "completions", prompt=f"Step 1 of many. {notes} Next:", **REUSE, **salt)
    for step, state in ((2, "idle"), (3, "reading the third file"), (4, "done")):
        head = f"Step {step}, state: {state}, {17 * step} lines. "
        tokens, prompt = reused(post(server, "completions", prompt=f"{head}{notes} Next:", **REUSE, **salt))
        assert tokens > prompt / 2


@pytest.mark.slow
def test_documents_in_every_order(server: RealServer) -> None:
    salt = {"cache_salt": "orders"}
    for text in STORY:
        post(server, "completions", prompt=f"Read this: {text}", **REUSE, **salt)
    for turn in range(len(STORY)):
        order = STORY[turn:] + STORY[:turn]
        body = {"prompt": f"Question {turn}. {' '.join(order)} Which is the longest?", **REUSE, **salt}
        tokens, prompt = reused(post(server, "completions", **body))
        assert tokens > prompt / 2
