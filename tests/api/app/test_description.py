"""`/openapi.json` is complete and correct: every example runs, and its response follows the schema.

The responses of all other HTTP tests are validated as well (`helpers/described.py`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.described import Description, description, reference
from helpers.live_server import Live, live_server
from helpers.scripted_engine import ScriptedEngine, model_info
from helpers.toy_tokenizers import taught
from jsonschema import Draft202012Validator

from windlass.engine.interface.model_info import ClassifierInfo
from windlass.server import application

DOCS = Path(__file__).parents[3] / "docs"
OPERATIONS = [(method, path) for method, path, _ in description().operations()]
EXAMPLES = [
    (path, name)
    for _, path, operation in description().operations()
    for name in operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("examples", {})
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "poet").mkdir()
    with live_server(lora_folder=folder, attention_maps=True) as live:
        yield live


def classifying() -> AbstractContextManager[Live]:
    classifier = ClassifierInfo(("bad", "good"), "softmax")
    return live_server(ScriptedEngine(info=model_info(classifier=classifier, generates=False)))


def filling() -> AbstractContextManager[Live]:
    return live_server(backend=taught(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")))


@pytest.fixture(scope="module")
def document(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = live.http.get("/openapi.json").json()
    return found


@pytest.mark.slow
def test_document_is_valid_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))) == set(
        document["components"]["schemas"]
    )


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_operation_is_complete(document: dict[str, Any], method: str, path: str) -> None:
    operation = document["paths"][path][method]
    assert re.fullmatch(r"[a-z_]+", operation["operationId"])
    assert operation["summary"] and operation["description"] and len(operation["tags"]) == 1
    resolve = Description(document).resolved
    for parameter in operation["parameters"]:
        assert resolve(parameter)["description"] and resolve(parameter)["schema"]
    if "{model}" in path:
        assert operation["parameters"][0]["example"] == "toy"
    body = operation.get("requestBody")
    assert (body is not None) is (method == "post")
    if body is not None:
        assert body["required"] and body["content"]["application/json"]["examples"], "give examples with the route"
    assert {"200", "408", "413", "429", "431", "500", "503"} <= set(operation["responses"])
    assert not {"401", "422"} & set(operation["responses"])
    for status, response in operation["responses"].items():
        response = resolve(response)
        assert response["description"] and "X-Request-Id" in response["headers"], status
        for media in response["content"].values():
            assert media["schema"], status
    assert all("Retry-After" in resolve(operation["responses"][status])["headers"] for status in ("429", "503"))


def test_operation_ids_are_unique(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in Description(document).operations()]
    assert len(set(names)) == len(names) > 15
    tags = {tag["name"] for tag in document["tags"]}
    assert tags == {operation["tags"][0] for _, _, operation in Description(document).operations()}
    assert all(tag["description"] for tag in document["tags"])


@pytest.mark.parametrize("name", sorted(description().document["components"]["schemas"]))
def test_every_field_is_described(name: str) -> None:
    schema = description().document["components"]["schemas"][name]
    assert schema.get("description"), f"{name} has no docstring"
    for field, described in schema.get("properties", {}).items():
        assert described.get("description"), f"describe {name}.{field} in its model"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        assert schema["additionalProperties"] is False or "type" in str(schema["additionalProperties"])


def test_every_response_has_a_schema(document: dict[str, Any]) -> None:
    for method, path, operation in Description(document).operations():
        for kind, media in operation["responses"]["200"]["content"].items():
            schema = media["schema"]
            if kind == "application/json":
                assert schema.get("$ref"), (method, path)
            elif kind == "text/event-stream":
                data = schema["properties"]["data"]
                assert data.get("anyOf", [data])[-1]["contentSchema"]["$ref"], (method, path)


def test_security_is_described_only_with_keys(document: dict[str, Any]) -> None:
    assert "security" not in document and "securitySchemes" not in document["components"]
    keyed = description().document
    assert keyed["security"] == [{"bearer": []}, {"apiKey": []}]
    assert keyed["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert keyed["components"]["securitySchemes"]["apiKey"]["name"] == "x-api-key"
    for _, path, operation in description().operations():
        opened = path in ("/health", "/ready")
        assert ("401" in operation["responses"]) is not opened
        assert (operation.get("security") == []) is opened
    with live_server(api_keys=("k",)) as locked:
        assert locked.http.post("/v1/messages", json={}).status_code == 401
        assert locked.http.get("/v1/models").status_code == 401
        assert locked.http.get("/v1/models", headers={"x-api-key": "k"}).status_code == 200


@pytest.mark.parametrize(("path", "name"), EXAMPLES)  # in order: adapters are loaded and unloaded
def test_every_example_runs(live: Live, document: dict[str, Any], path: str, name: str) -> None:
    media = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    body = media["examples"][name]["value"]
    assert media["examples"][name]["summary"]
    known = Description(document)
    known.validate(body, media["schema"])
    special = {"/classify": classifying, "/infill": filling}.get(path)
    with nullcontext(live) if special is None else special() as live:
        response = live.http.post(path, json=body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert len(known.check_stream(path, response.text)) > 3
    else:
        known.check(response)


@pytest.mark.parametrize(("method", "path"), [pair for pair in OPERATIONS if pair[0] != "post"])
def test_every_operation_without_a_body_runs(live: Live, document: dict[str, Any], method: str, path: str) -> None:
    kept = live.http.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}).json()["id"]
    response = live.http.request(method, path.replace("{model}", "toy").replace("{response_id}", kept))
    assert response.status_code == 200
    if response.headers["content-type"].startswith("application/json"):
        Description(document).check(response)
    links = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["links"]
    assert (document["paths"][path][method]["operationId"] in links) is ("{response_id}" in path)


def test_example_of_an_error_is_real(live: Live, document: dict[str, Any]) -> None:
    media = document["components"]["responses"]["BadRequest"]["content"]["application/json"]
    assert live.post("/v1/completions", {"prompt": "a", "temperature": -1}).json() == media["example"]


@pytest.mark.parametrize("status", [429, 503])
def test_every_code_of_the_reference_is_described(document: dict[str, Any], status: int) -> None:
    row = re.search(
        rf"^\| {status} \|(.*)", (DOCS / "reference" / "http-api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert row is not None
    name = {429: "TooManyRequests", 503: "Unavailable"}[status]
    told = document["components"]["responses"][name]["description"]
    codes = set(re.findall(r"`([a-z_]+)`", row[1]))
    assert len(codes) > 3 and codes == set(re.findall(r"`([a-z_]+)`", told))


def test_examples_of_streams_and_errors_follow_the_schemas() -> None:
    known, streams = description(), 0
    for _, path, operation in known.operations():
        for status, response in operation["responses"].items():
            for kind, media in known.resolved(response)["content"].items():
                if kind == "text/event-stream":
                    events = [example["value"] for example in media["examples"].values()]
                    for event in events:
                        known.validate(event, media["schema"])
                    known.check_stream(path, "".join(f"data: {event['data']}\n\n" for event in events))
                    streams += 1
                elif "example" in media:
                    assert status != "200"
                    known.validate(media["example"], media["schema"])
    assert streams == 5


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ("ErrorAnswer", {"error": {"message": "m", "type": "server_error", "param": None}}),
        ("ErrorAnswer", {"error": {"message": "m", "type": "odd", "param": None, "code": "c"}}),
        ("Status", {"status": "ready", "more": 1}),
        ("ChatEvent", {"choices": []}),
        ("MessageEvent", {"type": "content_block_stop"}),
        ("ResponseEvent", {"type": "response.output_text.delta", "sequence_number": 1}),
    ],
)
def test_schemas_refuse_invalid_values(schema: str, wrong: Any) -> None:
    with pytest.raises(AssertionError, match="not as described"):
        description().validate(wrong, reference(schema))


def test_undescribed_answer_is_detected() -> None:
    request = httpx.Request("GET", "http://test/v1/models/toy")
    headers = {"x-request-id": "r", "content-type": "application/json"}
    with pytest.raises(AssertionError, match="402 is not described"):
        description().check(httpx.Response(402, request=request, headers=headers, json={}))
    with pytest.raises(AssertionError, match="with text/plain"):
        description().check(httpx.Response(200, request=request, headers={"content-type": "text/plain"}, text="x"))
    with pytest.raises(AssertionError, match="has no X-Request-Id"):
        description().check(httpx.Response(404, request=request, json={}))


def test_document_is_built_once_without_delaying_others(monkeypatch: pytest.MonkeyPatch) -> None:
    openapi_document, begun, go_on, made = (
        application.openapi_document,
        threading.Event(),
        threading.Event(),
        list[bool](),
    )

    def slowly(*given: Any) -> dict[str, Any]:
        begun.set()
        found = openapi_document(*given)
        made.append(go_on.wait(30))
        return found

    monkeypatch.setattr(application, "openapi_document", slowly)
    with live_server() as live, ThreadPoolExecutor() as threads:
        assert not begun.is_set()
        asked = [threads.submit(live.http.get, "/openapi.json") for _ in range(3)]
        assert begun.wait(30)
        assert live.http.get("/health").status_code == 200 and not any(one.done() for one in asked)
        go_on.set()
        assert len({one.result().text for one in asked}) == 1 and made == [True]
        assert asked[0].result().json()["paths"]
