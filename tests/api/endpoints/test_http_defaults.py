"""Defaults of requests: the model's sampling parameters, its names and fingerprint, and the path of a proxy."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.live_server import Live, live_server, server_fixture

from windlass.server.config.settings import SamplingDefaults

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, typical_p=0.9, repetition_penalty=1.05)
shared = server_fixture(sampling=DEFAULTS, other_model_names=("alias", "org/model"), root_path="/a/llm")


def sampling_of(live: Live, path: str, **body: Any) -> Any:
    content = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    live.engine.requests.clear()
    assert live.post(path, {**content, **body}).status_code == 200
    return live.engine.requests[0].sampling


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_model_defaults_apply_to_requests_without_the_fields(live: Live, path: str) -> None:
    names = list(SamplingDefaults.__dataclass_fields__)
    neutral = SamplingDefaults()
    sampling = sampling_of(live, path)
    assert {name: getattr(sampling, name) for name in names} == {name: getattr(DEFAULTS, name) for name in names}
    for given in names:  # individually; a neutral value or 0 counts as given
        sampling = sampling_of(live, path, **{given: getattr(neutral, given)})
        for name in names:
            assert getattr(sampling, name) == getattr(neutral if name == given else DEFAULTS, name), (given, name)
    assert sampling_of(live, path, temperature=0).temperature == 0
    assert sampling_of(live, path, temperature=None).temperature == 0.6


def test_model_object_has_the_defaults_under_every_name(live: Live) -> None:
    listed = live.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["toy", "alias", "org/model"]
    assert all(model["sampling_defaults"]["top_k"] == 20 for model in listed)
    for model in listed:
        assert live.http.get(f"/v1/models/{model['id']}").json() == model
        answer = live.post(COMPLETIONS, {"prompt": "a", "model": model["id"]}).json()
        assert answer["model"] == "toy"
    assert live.refuse(COMPLETIONS, {"prompt": "a", "model": "other"}, 404)["code"] == "model_not_found"


def test_every_answer_and_chunk_has_the_fingerprint(live: Live) -> None:
    seen = set()
    for path, content in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        seen.add(live.post(path, content).json()["system_fingerprint"])
        events = live.stream(path, {**content, "stream_options": {"include_usage": True}})[:-1]
        assert len(events) > 2
        seen |= {event["system_fingerprint"] for event in events}
    assert len(seen) == 1 and seen.pop().startswith("fp_")


def test_the_fingerprint_changes_with_what_changes_answers(live: Live) -> None:
    def fingerprint(**settings: Any) -> str:
        with live_server(**settings) as other:
            return other.complete("a")["system_fingerprint"]

    own = live.complete("a")["system_fingerprint"]
    assert fingerprint(sampling=DEFAULTS) == own  # names and paths change nothing
    assert fingerprint() != own


def test_root_path_with_and_without_a_stripping_proxy(live: Live) -> None:
    assert live.http.get("/a/llm/v1/models").json() == live.http.get("/v1/models").json()
    assert live.post("/a/llm/v1/completions", {"prompt": "a"}).status_code == 200
    for path in ("/a/llmv1/models", "/a/v1/models", "/a/llm", "/a/llm/a/llm/v1/models"):
        assert live.http.get(path).status_code == 404
    assert live.http.get("/openapi.json").json()["servers"] == [{"url": "/a/llm"}]


def test_keys_are_required_under_a_root_path() -> None:
    with live_server(root_path="/llm", api_keys=("k",)) as locked:
        for path in ("/v1/models", "/llm/v1/models", "/llm/llm/health", "/health/llm/v1/models"):
            assert locked.http.get(path).status_code == 401, path
        assert locked.http.get("/llm/health").status_code == locked.http.get("/health").status_code == 200
        assert locked.http.get("/llm/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
