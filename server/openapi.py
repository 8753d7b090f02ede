"""The OpenAPI document: schemas, errors, and the texts that no single route has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pydantic.dataclasses  # noqa: F401  # pydantic imports it when it makes schemas: no request may wait for that
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from windlass.server.api.router import ApiRouter, Operation
from windlass.server.app.auth import PUBLIC_PATHS
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import MESSAGES_PATH, ApiError, error_body, is_messages_api
from windlass.server.schemas.base import UnsupportedKind
from windlass.server.schemas.messages import MessageError
from windlass.server.schemas.response_parts import ErrorAnswer

API_DESCRIPTION = """An inference server for language models with rotary attention. It implements OpenAI's API and Anthropic's Messages API, with additional fields.

Unknown fields are refused by name, and `null` means that a field is absent. Types are strict: an integer has no fraction, not even `.0`. Strings must not contain the null character. `HEAD` is answered like `GET`, without the body; `OPTIONS`, and the 405 of an unsupported method, list the methods of a path in `Allow`. Bodies are UTF-8 JSON. Errors have OpenAI's form, under `/v1/messages` Anthropic's; a request that is refused before it reaches an endpoint, such as one connection too many, gets OpenAI's.
"""  # noqa: E501

# Any request may get these: before it reaches a route, while it is read, or because of a defect.
COMMON_STATUSES = (408, 413, 429, 431, 500, 503)

# Errors of connections that no route sees, so that they have OpenAI's form on every path.
_CONNECTION_STATUSES = (408, 413, 429, 503)

# Name of the response in the components, and its description.
_STATUSES = {
    400: (
        "BadRequest",
        "The request is wrong: `param` names the field and `code` the reason (`invalid_json`, `missing_field`, "
        "`unknown_field`, `unsupported_field`, `invalid_value`, `context_length_exceeded`, …).",
    ),
    401: ("Unauthorized", "A valid API key is required (`invalid_api_key`)."),
    403: (
        "Forbidden",
        "The server is not configured for this (`adapters_fixed`, `attention_off`), the key is not permitted to do it "
        "(`not_an_administrator`), or a web page of another origin asks (`origin_not_allowed`).",
    ),
    404: (
        "NotFound",
        "No such model (`model_not_found`), response (`response_not_found`, `previous_response_not_found`), item "
        "(`item_not_found`) or path (`not_found`).",
    ),
    408: ("RequestTimeout", "The body (`body_timeout`) or the headers (`header_timeout`) did not arrive in time."),
    413: ("BodyTooLarge", "The body is too large (`request_too_large`)."),
    421: ("MisdirectedRequest", "The server is not reached by the host of the request (`host_not_allowed`)."),
    429: (
        "TooManyRequests",
        "Too many requests: `queue_full`, `too_many_requests`, `too_many_connections`, `too_many_bytes`, `too_much_text`, "
        "`too_many_crashes` or `rate_limit_exceeded`.",
    ),
    431: ("HeadersTooLarge", "The headers are too large (`request_too_large`)."),
    500: (
        "InternalError",
        "The server failed (`internal`); its log has details under the request's id. Or the numbers of the model or of its "
        "adapter overflow for this request (`not_finite`).",
    ),
    503: (
        "Unavailable",
        "The server cannot accept the request now: `engine_unavailable`, `draining`, `too_many_connections`, "
        "`text_unavailable` or `out_of_memory`.",
    ),
    504: ("DeadlineExceeded", "The request's deadline passed (`deadline_exceeded`)."),
}

_ERROR_EXAMPLES = (
    ApiError(400, "temperature should be greater than or equal to 0", param="temperature"),
    ApiError(
        401,
        "a valid API key is needed: send the header Authorization: Bearer <key>, or x-api-key: <key>",
        code="invalid_api_key",
    ),
    ApiError(
        403, "this server loads no adapters while it runs: start it with --lora-folder DIR", code="adapters_fixed"
    ),
    ApiError(
        404,
        "the model 'other' does not exist here: this server serves 'demo'",
        param="model",
        code="model_not_found",
    ),
    ApiError(408, "the body did not arrive in time", code="body_timeout"),
    ApiError(413, "the body is larger than 33554432 bytes", code="request_too_large"),
    ApiError(
        421,
        "this server does not answer to the host 'example.org': if clients reach it by this name, start it with --allowed-hosts "
        "example.org",
        param="host",
        code="host_not_allowed",
    ),
    ApiError(429, "4096 requests are in progress, the limit of this server", code="too_many_requests"),
    ApiError(431, "the headers are larger than 65536 bytes", code="request_too_large"),
    ApiError(500, "the server failed on this request; its log has details under this x-request-id"),
    ApiError(503, "the engine is starting", code="engine_unavailable"),
    ApiError(504, "the request's deadline passed before it finished", code="deadline_exceeded"),
)

_EXAMPLE_REQUEST_ID = "0b6f5d3c9e7a4d0f8f8c2b1a3d4e5f60"

HEADERS: dict[str, Any] = {
    "X-Request-Id": {
        "description": "The id that the request sent, else a new one. The server's log has it.",
        "schema": {"type": "string"},
    },
    "Request-Id": {"description": "The same, under the name of Anthropic's API.", "schema": {"type": "string"}},
    "X-Windlass-Ignored": {
        "description": "Fields of the request that had no effect, separated by commas. Absent if there are none.",
        "required": False,
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {
        "description": "How to send the key.",
        "schema": {"type": "string", "const": "Bearer"},
    },
}

_REQUEST_ID_PARAMETER: dict[str, Any] = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "An id of 1 to 128 characters (letters, digits and `._:/-`) that the response and the server's log "
    "repeat. Default, and in place of an invalid one: a new id.",
    "schema": {"type": "string"},
}

_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this server."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, in another header."},
}

_REFERENCE = "#/components/schemas/{model}"


def openapi_document(app: FastAPI, routers: Sequence[ApiRouter], settings: ServerSettings) -> dict[str, Any]:
    """The complete document of this server, whose endpoints are those of the routers."""
    document = FastAPI.openapi(app)
    document["info"]["description"] = API_DESCRIPTION
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    operations = {key: operation for router in routers for key, operation in router.operations.items()}
    document["components"] = {
        "schemas": schemas(operations.values()),
        "responses": _error_responses(settings),
        "headers": HEADERS,
        "parameters": {"RequestId": _REQUEST_ID_PARAMETER},
    }
    if settings.requires_key:
        document["components"]["securitySchemes"] = _SECURITY_SCHEMES
        document["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            _complete_operation(described, path, operations[path, method], settings)
    tags = [{"name": router.tag, "description": router.description} for router in routers]
    document["tags"] = tags
    return document


def schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """The JSON schemas of all models of the operations and of errors, by name."""
    models: dict[type[BaseModel], None] = {ErrorAnswer: None, MessageError: None}
    for operation in operations:
        models |= {model: None for model in (operation.body, operation.response, operation.events) if model}
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    known: dict[str, Any] = found["$defs"]
    # Objects of unsupported kinds are parsed only to be refused by name: requests cannot contain them.
    unsupported = {model.__name__ for model in UnsupportedKind.__subclasses__()}
    references = {_REFERENCE.format(model=name) for name in unsupported}
    supported = {name: schema for name, schema in known.items() if name not in unsupported}
    for schema in supported.values():
        _remove_alternatives(schema, references)
        for described in schema.get("properties", {}).values():
            described.pop("title", None)  # it only repeats the name
            if "const" in described:
                described.setdefault("description", f"Always `{described['const']}`.")
    return supported


def _remove_alternatives(schema: Any, references: set[str]) -> None:
    """Remove alternatives with one of the references from a schema, in place."""
    if isinstance(schema, list):
        for item in schema:
            _remove_alternatives(item, references)
    elif isinstance(schema, dict):
        for key in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(key), list):
                schema[key] = _deduplicated([item for item in alternatives if item.get("$ref") not in references])
        for item in schema.values():
            _remove_alternatives(item, references)


def _deduplicated(alternatives: list[Any]) -> list[Any]:
    return [item for number, item in enumerate(alternatives) if item not in alternatives[:number]]


def _complete_operation(described: dict[str, Any], path: str, operation: Operation, settings: ServerSettings) -> None:
    """Complete FastAPI's description of one operation, in place."""
    described["description"] = " ".join(described.get("description", "").split())
    described["summary"] = described["description"].split(". ")[0].rstrip(".")
    for parameter in described.setdefault("parameters", []):
        parameter["schema"].pop("title", None)
        parameter["schema"].pop("description", None)
        if parameter["name"] == "model":
            parameter["example"] = settings.served_model_name
    described["parameters"] += [*operation.parameters, {"$ref": "#/components/parameters/RequestId"}]
    if operation.body is not None:
        media: dict[str, Any] = {"schema": _reference(operation.body)}
        if operation.examples:
            model = {"model": settings.served_model_name} if "model" in operation.body.model_fields else {}
            media["examples"] = {
                name: {"summary": summary, "value": {**model, **body}}
                for name, (summary, body) in operation.examples.items()
            }
        described["requestBody"] = {"required": True, "content": {"application/json": media}}
    needs_key = settings.requires_key and path not in PUBLIC_PATHS
    statuses = {
        *COMMON_STATUSES,
        *operation.errors,
        *((401,) if needs_key else ()),
        *((403,) if settings.checks_origins else ()),
        *((421,) if settings.checks_hosts else ()),
    }
    described["responses"] = _responses(operation, sorted(statuses), messages=is_messages_api({"path": path}))
    if settings.requires_key and not needs_key:
        described["security"] = []


def _responses(operation: Operation, statuses: Sequence[int], *, messages: bool) -> dict[str, Any]:
    """The responses of an operation. statuses: those of errors."""
    media_type = "text/plain" if operation.response is None else "application/json"
    schema: dict[str, Any] = {"type": "string"} if operation.response is None else _reference(operation.response)
    content: dict[str, Any] = {media_type: {"schema": schema}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _event_schema(operation), "examples": _stream_examples(operation)}
    names = ["X-Request-Id", "Request-Id"] if messages else ["X-Request-Id"]
    if operation.body is not None:
        names.append("X-Windlass-Ignored")
    success: dict[str, Any] = {"description": "Success", "content": content, "headers": _headers(names)}
    if operation.links:
        success["links"] = {
            name: {"operationId": name, "parameters": {"response_id": "$response.body#/id"}, "description": text}
            for name, text in operation.links.items()
        }
    responses = {"200": success}
    for status in statuses:
        responses[str(status)] = {"$ref": f"#/components/responses/{_response_name(status, messages=messages)}"}
    if operation.unready is not None:
        # The endpoint's own response, or the error of a connection that no route sees.
        response = _error_response(503, messages)
        error = response["content"]["application/json"]["schema"]
        own = {"application/json": {"schema": {"anyOf": [schema, error]}}}
        responses["503"] = {**response, "description": operation.unready, "content": own}
    return dict(sorted(responses.items()))


def _event_schema(operation: Operation) -> dict[str, Any]:
    """The schema of one event, as OpenAPI 3.2 and the tools for 3.1 understand it."""
    assert operation.events is not None
    data: dict[str, Any] = {
        "type": "string",
        "description": "One line of JSON.",
        "contentMediaType": "application/json",
        "contentSchema": _reference(operation.events),
    }
    properties: dict[str, Any] = {}
    if operation.named_events:
        properties["event"] = {"type": "string", "description": "The `type` of its data."}
    if operation.done_event:
        last = {"const": "[DONE]", "description": "The last event."}
        data = {"description": "The event's data.", "anyOf": [last, data]}
    properties["data"] = data
    text = "An event. Lines that begin with a colon are comments."
    return {"type": "object", "description": text, "properties": properties, "required": list(properties)}


def _stream_examples(operation: Operation) -> dict[str, Any]:
    events: list[dict[str, str]] = [
        {**({"event": event["type"]} if operation.named_events else {}), "data": json.dumps(event)}
        for event in operation.stream_examples
    ]
    if operation.done_event:
        events.append({"data": "[DONE]"})
    return {f"event_{number}": {"value": event} for number, event in enumerate(events, start=1)}


def _response_name(status: int, *, messages: bool) -> str:
    """Name of an error response in the components. messages: of Anthropic's API."""
    return ("Messages" if messages else "") + _STATUSES[status][0]


def _error_responses(settings: ServerSettings) -> dict[str, Any]:
    """All error responses of this server by name."""
    absent = {status for status, used in ((401, settings.requires_key), (421, settings.checks_hosts)) if not used}
    statuses = [status for status in _STATUSES if status not in absent]
    return {
        _response_name(status, messages=messages): _error_response(status, messages)
        for messages in (False, True)
        for status in statuses
    }


def _error_response(status: int, messages: bool) -> dict[str, Any]:
    (error,) = (example for example in _ERROR_EXAMPLES if example.status == status)
    scope = {"path": MESSAGES_PATH if messages else "/", "windlass.request_id": _EXAMPLE_REQUEST_ID}
    schema: dict[str, Any] = _reference(ErrorAnswer)
    names = ["X-Request-Id"]
    if messages:
        own = _reference(MessageError)
        schema = {"anyOf": [own, schema]} if status in _CONNECTION_STATUSES else own
        names.append("Request-Id")
    if status in (429, 503):
        names.append("Retry-After")
    if status == 401:
        names.append("WWW-Authenticate")
    return {
        "description": _STATUSES[status][1],
        "headers": _headers(names),
        "content": {"application/json": {"schema": schema, "example": error_body(error, scope)}},
    }


def _headers(names: Sequence[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
