"""Validation of responses against the OpenAPI document: status, content type, headers and schema."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
from helpers.scripted_engine import ScriptedEngine
from helpers.toy_tokenizers import byte_level

from windlass.server.application import create_app
from windlass.server.config.settings import ServerSettings
from windlass.server.text.tokenizer import Tokenizer


class Description:
    """OpenAPI document of a server."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._validators: dict[str, jsonschema.Draft202012Validator] = {}
        self._paths = [(re.compile(re.sub(r"\{model\}", ".+", re.sub(r"\{(?!model)\w+\}", "[^/]+", path))), path)
                       for path in document["paths"]]  # fmt: skip

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield method, path and operation."""
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                yield method, path, operation

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        """Return the operation of a method and path, None if there is none."""
        for pattern, template in self._paths:
            if pattern.fullmatch(path):
                found: dict[str, Any] | None = self.document["paths"][template].get(method.lower())
                return found
        return None

    def resolved(self, item: dict[str, Any]) -> dict[str, Any]:
        """Resolve a reference."""
        while "$ref" in item:
            found = self.document
            for part in item["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            item = found
        return item

    def validate(self, value: Any, schema: dict[str, Any]) -> None:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            whole = {**schema, "components": self.document["components"]}
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        if (error := jsonschema.exceptions.best_match(self._validators[key].iter_errors(value))) is not None:
            raise AssertionError(f"not as described: {error.json_path}: {error.message[:2000]}")

    def check(self, response: httpx.Response) -> None:
        """Fail unless the document describes the response. Unknown paths and methods return ordinary errors."""
        request = response.request
        if request.method in ("HEAD", "OPTIONS"):
            return
        operation = self.operation(request.method, request.url.path)
        if operation is None:
            if response.status_code in (401, 404, 405, 413, 431):
                messages = (request.url.path + "/").startswith("/v1/messages/")
                self.validate(response.json(), reference("MessageError" if messages else "ErrorAnswer"))
            return
        where = f"{request.method} {request.url.path} {response.status_code}"
        assert str(response.status_code) in operation["responses"], f"{where} is not described"
        described = self.resolved(operation["responses"][str(response.status_code)])
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in described["content"], f"{where} with {kind} is not described"
        for name, header in described["headers"].items():
            if self.resolved(header).get("required") is False:
                continue
            absent = name != "WWW-Authenticate" and response.headers.get("connection") == "close"  # rejected earlier
            assert absent or name in response.headers, f"{where} has no {name}"
        if kind == "application/json":
            self.validate(response.json(), described["content"][kind]["schema"])

    def check_event(self, path: str, event: Any) -> None:
        """Fail unless the document permits this event in streams of the path."""
        operation = self.operation("post", path)
        assert operation is not None
        media = operation["responses"]["200"]["content"]["text/event-stream"]
        data = media["schema"]["properties"]["data"]
        self.validate(event, data.get("anyOf", [data])[-1]["contentSchema"])

    def check_stream(self, path: str, text: str) -> list[Any]:
        """Return the events of a stream after validation."""
        events = []
        for line in text.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line.removeprefix("data: ")))
                self.check_event(path, events[-1])
            else:
                assert line in ("", "data: [DONE]") or line.startswith((":", "event: ")), line
        return events


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


@functools.cache
def description() -> Description:
    """Return the document of a server with API keys. Others have no 401 and different names."""
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    app = create_app(ScriptedEngine(), tokenizer, ServerSettings(served_model_name="toy", api_keys=("k",)))
    return Description(json.loads(json.dumps(app.openapi())))


def check(response: httpx.Response) -> None:
    """httpx hook that validates every JSON response."""
    if response.headers.get("content-type", "").startswith("application/json"):
        response.read()
        description().check(response)
