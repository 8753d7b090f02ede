"""Puts `/openapi.json` together: what the routes declare, and what holds for all of them.

A route tells its body, its answer and the errors that are its own. Here they get names, headers, keys, words and examples, and
the errors that any request may be answered with.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from windlass.server.app.auth import OPEN_PATHS
from windlass.server.app.description.errors import EVERYWHERE, HEADERS, error_responses, name_of
from windlass.server.app.description.examples import examples_of, streams_of
from windlass.server.app.description.models import schemas
from windlass.server.app.description.words import INFO, LINKS, PARAMETERS, TAGS
from windlass.server.errors import of_messages
from windlass.server.options.settings import ServerSettings

_METHODS = ("get", "post", "put", "patch", "delete")
_REQUEST_ID: dict[str, Any] = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": PARAMETERS["X-Request-Id"],
    "schema": {"type": "string"},
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this server."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, in another header."},
}


def describe(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """The whole document of this server."""
    document = FastAPI.openapi(app)
    document["info"]["description"] = INFO
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    document["components"] = {
        "schemas": schemas(),
        "responses": error_responses(keys=settings.asks_for_keys),
        "headers": HEADERS,
        "parameters": {"RequestId": _REQUEST_ID},
    }
    if settings.asks_for_keys:
        document["components"]["securitySchemes"] = _KEYS
        document["security"] = [{name: []} for name in _KEYS]
    tags: dict[str, str] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                name, text = TAGS.get(operation["tags"][0], (operation["tags"][0].capitalize(), ""))
                operation["tags"], tags[name] = [name], text
                _complete(operation, path, method, settings)
    document["tags"] = [{"name": name, "description": text} for name, text in tags.items()]
    return document


def _complete(operation: dict[str, Any], path: str, method: str, settings: ServerSettings) -> None:
    """Fill in what one operation leaves to this room, in place."""
    operation["description"] = " ".join(operation.get("description", "").split())
    operation["summary"] = operation["description"].split(". ")[0].rstrip(".")
    for parameter in operation.setdefault("parameters", []):
        parameter.setdefault("description", PARAMETERS.get(parameter["name"], ""))
        parameter["schema"].pop("title", None)
        if parameter["name"] == "model":
            parameter["example"] = settings.served_model_name
    operation["parameters"].append({"$ref": "#/components/parameters/RequestId"})
    if examples := examples_of(path, settings.served_model_name):
        operation["requestBody"]["content"]["application/json"]["examples"] = examples
    _complete_responses(operation["responses"], path, method, settings.asks_for_keys)
    if path in OPEN_PATHS and settings.asks_for_keys:
        operation["security"] = []


def _complete_responses(responses: dict[str, Any], path: str, method: str, keys: bool) -> None:
    messages = of_messages({"path": path})
    needs_key = keys and path not in OPEN_PATHS
    responses.pop("422", None)  # bodies are read by the routes themselves
    statuses = {int(status) for status in responses if status != "200"} | set(EVERYWHERE)
    statuses = statuses | {401} if needs_key else statuses - {401}
    for status in statuses:
        shared = {"$ref": f"#/components/responses/{name_of(status, messages=messages)}"}
        own = responses.get(str(status), {}).get("content")
        responses[str(status)] = _either(status, own, messages=messages) if own else shared
    good = responses["200"]
    good["content"] = {
        kind: media for kind, media in good["content"].items() if media.get("schema")
    }  # what FastAPI adds
    names = ["X-Request-Id", "Request-Id"] if messages else ["X-Request-Id"]
    good["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    if examples := streams_of(path):
        good["content"]["text/event-stream"]["examples"] = examples
    if method == "post" and path in LINKS:
        good["links"] = LINKS[path]
    ordered = dict(sorted(responses.items()))
    responses.clear()
    responses.update(ordered)


def _either(status: int, own: dict[str, Any], *, messages: bool) -> dict[str, Any]:
    """A status with an answer of the route's own, which may also be an error of a connection that no route sees."""
    response = error_responses(keys=True)[name_of(status, messages=messages)]
    error = response["content"]["application/json"]["schema"]
    return {
        **response,
        "content": {"application/json": {"schema": {"anyOf": [own["application/json"]["schema"], error]}}},
    }
