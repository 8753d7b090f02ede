"""Fields without effect are accepted and named in a header; unknown ones are refused unless the operator accepts them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helpers.described import description
from helpers.doc_examples import ROOT
from helpers.live_server import Live, live_server, server_fixture

from windlass.server.config.server_options import ServerOptions
from windlass.server.schemas.base import IGNORED_FIELDS, IGNORED_HEADER

USER = [{"role": "user", "content": "hello"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
}
CHAT = "/v1/chat/completions"
shared = server_fixture()


@pytest.mark.parametrize("path", PLAIN)
def test_fields_of_other_services_are_accepted_and_named(live: Live, path: str) -> None:
    """A stream has the header, too, and so has a refusal."""
    document = description().document
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    declared = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    given = sorted(name for name in IGNORED_FIELDS if declared[name]["description"].startswith("Field of "))
    assert {"keep_alive", "think", "timings_per_token", "vllm_xargs", "service_tier", "speed"} <= {*given}
    for start in range(0, len(given), 30):
        names = given[start : start + 30]
        response = live.post(path, {**PLAIN[path], **{name: {"any": [1]} for name in names}})
        assert response.status_code == 200, response.text
        assert response.headers[IGNORED_HEADER].split(", ") == names
    assert IGNORED_HEADER not in live.post(path, {**PLAIN[path], "think": None}).headers
    refused = live.post(path, {**PLAIN[path], "think": True, "model": "nowhere"})
    assert (refused.status_code, refused.headers[IGNORED_HEADER]) == (404, "think")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_streams_name_ignored_fields(live: Live, path: str) -> None:
    with live.http.stream("POST", path, json={**PLAIN[path], "stream": True, "keep_alive": "5m"}) as response:
        assert response.headers[IGNORED_HEADER] == "keep_alive"
        response.read()


def test_effort_is_named_where_the_model_does_not_reason(live: Live) -> None:
    for effort, header in (("low", "reasoning_effort"), ("none", None)):
        response = live.post(CHAT, {"messages": USER, "reasoning_effort": effort, "max_tokens": 1})
        assert response.status_code == 200 and response.headers.get(IGNORED_HEADER) == header
    with live_server(template="{{ reasoning_effort }}{{ messages[0].content }}</think>") as thinking:
        response = thinking.post(CHAT, {"messages": USER, "reasoning_effort": "low", "max_tokens": 1})
        assert IGNORED_HEADER not in response.headers and thinking.prompt.startswith("low")


def test_misspelt_fields_are_refused_with_a_hint(live: Live) -> None:
    for name, hint in (
        ("temprature", "did you mean 'temperature'?"),
        ("keep_alives", "remove it"),
        ("options", "itself"),
    ):
        error = live.refuse(CHAT, {"messages": USER, name: 1})
        assert (error["param"], error["code"]) == (name, "unknown_field") and hint in error["message"]


@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_unknown_fields_may_be_accepted(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": "user", "content": "hello", "mood": "fine"}]
    body = {"messages": turns, "max_tokens": 1, "temprature": 0, "a,b\n\u00e9": 1, "use_beam_search": True, "n" * 99: 1}
    with live_server(unknown_fields=mode) as live:
        response = live.post(CHAT, body)
        assert response.status_code == 200, response.text
        names = {"temprature", "a?b??", "use_beam_search", "n" * 64, "mood"}
        assert set(response.headers[IGNORED_HEADER].split(", ")) == names
        assert ("temprature" in caplog.text) is (mode == "warn")
        many = live.post(CHAT, {"messages": USER, "max_tokens": 1, **{f"field{number}": 1 for number in range(1000)}})
        assert len(many.headers[IGNORED_HEADER].split(", ")) == 32
        assert live.refusal(CHAT, {"messages": USER, "temperature": "hot"})[0] == "temperature"
        assert live.refusal(CHAT, {"temprature": 0}) == ("messages", "missing_field")


def test_options_of_the_server() -> None:
    settings = ServerOptions(served_model_name=["*", "a"], unknown_fields="warn").to_settings("toy")
    assert (settings.model_names, settings.any_model_name, settings.unknown_fields) == (("a",), True, "warn")
    settings = ServerOptions(served_model_name=["*"]).to_settings("toy")
    assert (settings.model_names, settings.any_model_name, settings.default_max_tokens) == (("toy",), True, None)


def test_any_name_of_the_model(live: Live) -> None:
    assert live.refusal(CHAT, {"messages": USER, "model": "gpt-4o"}, 404) == ("model", "model_not_found")
    with live_server(any_model_name=True) as open_names:
        for path, body in PLAIN.items():
            answer = open_names.request(path, model="claude-sonnet", **body)
            assert answer.get("model", "toy") == "toy"


def test_a_byte_order_mark_before_the_body(live: Live) -> None:
    body = json.dumps(PLAIN[CHAT]).encode()
    headers = {"content-type": "application/json"}
    assert live.http.post(CHAT, content=b"\xef\xbb\xbf" + body, headers=headers).status_code == 200
    large = body + b" " * (300 << 10)  # parsed in a thread
    assert live.http.post(CHAT, content=b"\xef\xbb\xbf" + large, headers=headers).status_code == 200
    for wrong in (b"\xef\xbb\xbf" * 2 + body, b"\xef\xbb\xbf"):
        assert live.http.post(CHAT, content=wrong, headers=headers).json()["error"]["code"] == "invalid_json"


def test_the_default_limit_is_what_the_context_leaves(live: Live) -> None:
    def limit(path: str, **body: Any) -> tuple[int, int]:
        live.request(path, **body)
        request = live.engine.requests[-1]
        return request.sampling.max_tokens, len(request.prompt_token_ids)

    assert live.info is not None
    for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/responses", {"input": "a"})):
        assert sum(limit(path, **body)) == live.info.max_model_len
        assert limit(path, **body, context_overflow="drop_turns")[0] > 0
    assert limit("/v1/completions", prompt="a")[0] == 16
    with live_server(default_max_tokens=20) as limited:
        limited.chat()
        assert limited.engine.requests[-1].sampling.max_tokens == 20


def test_documentation_lists_the_ignored_fields() -> None:
    page = (ROOT / "docs" / "reference" / "fields.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (OpenAI|Anthropic|vLLM|llama\.cpp|Ollama) \| (`.*) \|$", page, re.MULTILINE)
    shown = {name: definer for definer, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert shown == IGNORED_FIELDS
