"""The OpenAPI document: schemas, errors and the texts that belong to no single route."""

from __future__ import annotations

from typing import Any

import pydantic.dataclasses  # noqa: F401  # pydantic imports it when it makes schemas: no request is to wait for that
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from windlass.server.api.adapters import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from windlass.server.api.introspection import AttentionMap, AttentionRequest, CachePages
from windlass.server.api.rotary import (
    RotaryCurves,
    RotaryCurvesRequest,
    RotaryInspection,
    RotaryInspectRequest,
    RotarySettings,
)
from windlass.server.api.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TemplateAnswer,
    TemplateRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from windlass.server.app.auth import PUBLIC_PATHS
from windlass.server.config.settings import ServerSettings
from windlass.server.errors import is_messages_api
from windlass.server.openapi_examples import request_examples, stream_examples
from windlass.server.schemas.chat import ChatCompletion, ChatEvent, ChatRequest
from windlass.server.schemas.completions import (
    Completion,
    CompletionEvent,
    CompletionRequest,
    Infill,
    InfillEvent,
    InfillRequest,
)
from windlass.server.schemas.messages import (
    CountTokensRequest,
    MessageAnswer,
    MessageError,
    MessageEvent,
    MessageRequest,
    TokenCount,
)
from windlass.server.schemas.openapi import REF
from windlass.server.schemas.pooling import (
    ClassifyRequest,
    ClassList,
    EmbeddingList,
    EmbeddingRequest,
    PoolingRequest,
    Reranking,
    RerankRequest,
    RowsList,
    ScoreList,
    ScoreRequest,
)
from windlass.server.schemas.response_parts import ErrorAnswer, Model, ModelList, Status, Version
from windlass.server.schemas.responses import (
    CountInputRequest,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseAnswer,
    ResponseEvent,
    ResponseRequest,
)

API_DESCRIPTION = """An inference server for language models with rotary attention. Its endpoints are those of OpenAI's API and of Anthropic's Messages API, with further fields beside theirs.

A field that the server does not know is refused by name, and `null` counts as left out. Types are strict: an integer has no fraction, not even `.0`. Strings hold no null character. `HEAD` answers as `GET` does, without the body; `OPTIONS`, and the 405 of another method, name in `Allow` what a path takes. Bodies are UTF-8 JSON. An error has OpenAI's form, under `/v1/messages` Anthropic's; what is refused before it reaches an endpoint, such as a connection too many, has OpenAI's.
"""  # noqa: E501

TAGS = {
    "Completions": "What follows a prompt.",
    "Fill-in-the-middle": "What stands in a gap, in llama.cpp's form.",
    "Chat": "The next turn of a conversation, in OpenAI's form.",
    "Responses": "OpenAI's Responses API, and what is kept of its answers.",
    "Messages": "Anthropic's Messages API.",
    "Embeddings": "Texts as vectors.",
    "Ranking": "How well texts go together.",
    "Classes": "What kind of text it is, where the model was trained to tell.",
    "Tokens": "Text to token ids and back.",
    "Models": "What is served.",
    "Adapters": "LoRA adapters, which come and go while the server runs.",
    "Rotary": "What the model rotates by, and what a scaling would make of it.",
    "Inside": "What the cache holds, and what a layer attends to.",
    "Health": "How the server is.",
}

PARAMETER_DESCRIPTIONS = {
    "model": "A name of the served model.",
    "response_id": "The `id` of a response that is kept.",
    "X-Request-Id": "An id of 1 to 128 characters (letters, digits and `._:/-`) that the answer and the server's log repeat. "
    "Where it is left out or cannot be used, there is a new one.",
}

# An answer of `/v1/responses` has an id that the requests below take.
LINKS: dict[str, Any] = {
    "/v1/responses": {
        name: {"operationId": name, "parameters": {"response_id": "$response.body#/id"}, "description": text}
        for name, text in (
            ("get_response", "Reads the response again."),
            ("list_input_items", "What it answered."),
            ("delete_response", "Forgets it."),
        )
    }
}

# Any request may be answered with these: before it reaches a route, while it is read, or for a defect.
COMMON_STATUSES = (408, 413, 429, 431, 500, 503)

# By connections that no route sees, so that they have OpenAI's shape wherever they were meant for.
_CONNECTION_STATUSES = (408, 429, 503)

_RESPONSE_NAMES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    408: "RequestTimeout",
    413: "BodyTooLarge",
    429: "TooManyRequests",
    431: "HeadersTooLarge",
    500: "InternalError",
    503: "Unavailable",
    504: "DeadlineExceeded",
}

_STATUS_DESCRIPTIONS = {
    400: "The request is at fault: `param` names the field and `code` says how (`invalid_json`, `missing_field`, "
    "`unknown_field`, `unsupported_field`, `invalid_value`, `context_length_exceeded`, …).",
    401: "A valid API key is needed (`invalid_api_key`).",
    403: "This server is not set up for it (`adapters_fixed`, `attention_off`), or the key may not (`not_an_administrator`).",
    404: "There is no such model (`model_not_found`), response (`response_not_found`, `previous_response_not_found`), "
    "item (`item_not_found`) or path (`not_found`).",
    408: "The body (`body_timeout`) or the headers (`header_timeout`) did not come in time.",
    413: "The body is too large (`request_too_large`).",
    429: "Too many requests: `queue_full`, `too_many_requests`, `too_many_connections`, `too_many_bytes`, `too_much_text` or "
    "`rate_limit_exceeded`.",
    431: "The headers are too large (`request_too_large`).",
    500: "The server failed (`internal`): its log has details under the request's id.",
    503: "The server cannot take the request now: `engine_unavailable`, `draining`, `too_many_connections`, "
    "`text_unavailable` or `out_of_memory`.",
    504: "The request's deadline passed (`deadline_exceeded`).",
}

_ERROR_TYPES = {429: "rate_limit_error"}

_MESSAGES_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_EXAMPLES = {
    400: ("temperature should be greater than or equal to 0", "temperature", "invalid_value"),
    401: (
        "a valid API key is needed: send the header Authorization: Bearer <key>, or x-api-key: <key>",
        None,
        "invalid_api_key",
    ),
    403: ("this server loads no adapters while it runs: start it with --lora-folder DIR", None, "adapters_fixed"),
    404: ("the model 'other' does not exist here: this server serves 'demo'", "model", "model_not_found"),
    408: ("the body did not come in time", None, "body_timeout"),
    413: ("the body is larger than 33554432 bytes", None, "request_too_large"),
    429: ("4096 requests are in progress, the most this server takes", None, "too_many_requests"),
    431: ("the headers are larger than 65536 bytes", None, "request_too_large"),
    500: ("the server failed on this request; its log has details under this x-request-id", None, "internal"),
    503: ("the engine is starting", None, "engine_unavailable"),
    504: ("the request's deadline passed before it finished", None, "deadline_exceeded"),
}

HEADERS: dict[str, Any] = {
    "X-Request-Id": {
        "description": "The id that was sent with the request, else a new one; the server's log has it.",
        "schema": {"type": "string"},
    },
    "Request-Id": {"description": "The same under the name of Anthropic's API.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}},
    "WWW-Authenticate": {"description": "How keys are sent.", "schema": {"type": "string", "const": "Bearer"}},
}


def response_name(status: int, *, messages: bool) -> str:
    """The name of a response among the components. messages: of Anthropic's API."""
    return ("Messages" if messages else "") + _RESPONSE_NAMES.get(status, f"Status{status}")


def error_responses(*, keys: bool) -> dict[str, Any]:
    """The responses of all errors, by name. keys: whether this server asks for any."""
    statuses = [status for status in _RESPONSE_NAMES if keys or status != 401]
    return {
        response_name(status, messages=both): _response(status, both) for both in (False, True) for status in statuses
    }


def _response(status: int, messages: bool) -> dict[str, Any]:
    message, param, code = _EXAMPLES[status]
    error = {"message": message, "type": _ERROR_TYPES.get(status, _error_type(status)), "param": param, "code": code}
    example: dict[str, Any] = {"error": error}
    schema: dict[str, Any] = {"$ref": "#/components/schemas/ErrorAnswer"}
    headers = {"X-Request-Id": _header("X-Request-Id")}
    if messages:
        detail = {"type": _MESSAGES_TYPES[status], "message": message, "param": param, "code": code}
        example = {"type": "error", "error": detail, "request_id": "0b6f5d3c9e7a4d0f8f8c2b1a3d4e5f60"}
        messages_error = {"$ref": "#/components/schemas/MessageError"}
        schema = {"anyOf": [messages_error, schema]} if status in _CONNECTION_STATUSES else messages_error
        headers["Request-Id"] = _header("Request-Id")
    if status in (429, 503):
        headers["Retry-After"] = _header("Retry-After")
    if status == 401:
        headers["WWW-Authenticate"] = _header("WWW-Authenticate")
    return {
        "description": _STATUS_DESCRIPTIONS[status],
        "headers": headers,
        "content": {"application/json": {"schema": schema, "example": example}},
    }


def _error_type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


def _header(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/headers/{name}"}


_MODELS: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    Completion,
    CompletionEvent,
    InfillRequest,
    Infill,
    InfillEvent,
    ChatRequest,
    ChatCompletion,
    ChatEvent,
    ResponseRequest,
    ResponseAnswer,
    ResponseEvent,
    DeletedResponse,
    ItemList,
    CountInputRequest,
    InputTokens,
    MessageRequest,
    MessageAnswer,
    MessageEvent,
    MessageError,
    CountTokensRequest,
    TokenCount,
    EmbeddingRequest,
    EmbeddingList,
    PoolingRequest,
    RowsList,
    ScoreRequest,
    ScoreList,
    RerankRequest,
    Reranking,
    ClassifyRequest,
    ClassList,
    TemplateRequest,
    TemplateAnswer,
    TokenizeRequest,
    TokenizeAnswer,
    DetokenizeRequest,
    DetokenizeAnswer,
    RotarySettings,
    RotaryInspectRequest,
    RotaryInspection,
    RotaryCurvesRequest,
    RotaryCurves,
    CachePages,
    AttentionRequest,
    AttentionMap,
    Model,
    ModelList,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    AdapterAnswer,
    Status,
    Version,
    ErrorAnswer,
)


def schemas() -> dict[str, Any]:
    """The schemas by their names."""
    _, found = models_json_schema([(model, "validation") for model in _MODELS], ref_template=REF)
    known: dict[str, Any] = found["$defs"]
    # Objects of unknown kinds are let through to be refused by name: they are no part of what is taken.
    other_kinds = {REF.format(model=name) for name in known if name.startswith("_Other")}
    remaining = {name: schema for name, schema in known.items() if REF.format(model=name) not in other_kinds}
    for schema in remaining.values():
        _remove_alternatives(schema, other_kinds)
        for described in schema.get("properties", {}).values():
            described.pop("title", None)  # it only repeats the name
            if "const" in described:
                described.setdefault("description", f"Always `{described['const']}`.")
    return remaining


def _remove_alternatives(schema: Any, refs: set[str]) -> None:
    """Take alternatives that refer to these out of a schema, in place."""
    if isinstance(schema, list):
        for item in schema:
            _remove_alternatives(item, refs)
    elif isinstance(schema, dict):
        for key in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(key), list):
                schema[key] = _deduplicated([item for item in alternatives if item.get("$ref") not in refs])
        for item in schema.values():
            _remove_alternatives(item, refs)


def _deduplicated(alternatives: list[Any]) -> list[Any]:
    return [item for number, item in enumerate(alternatives) if item not in alternatives[:number]]


_METHODS = ("get", "post", "put", "patch", "delete")

_REQUEST_ID: dict[str, Any] = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": PARAMETER_DESCRIPTIONS["X-Request-Id"],
    "schema": {"type": "string"},
}

_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of this server."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, in another header."},
}


def openapi_document(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """The whole document of this server."""
    document = FastAPI.openapi(app)
    document["info"]["description"] = API_DESCRIPTION
    document["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    document["components"] = {
        "schemas": schemas(),
        "responses": error_responses(keys=settings.requires_key),
        "headers": HEADERS,
        "parameters": {"RequestId": _REQUEST_ID},
    }
    if settings.requires_key:
        document["components"]["securitySchemes"] = _SECURITY_SCHEMES
        document["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    tags: dict[str, str] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                (tag,) = operation["tags"]
                tags[tag] = TAGS[tag]
                _complete_operation(operation, path, method, settings)
    document["tags"] = [{"name": name, "description": text} for name, text in tags.items()]
    return document


def _complete_operation(operation: dict[str, Any], path: str, method: str, settings: ServerSettings) -> None:
    """Fill in what one operation leaves to this room, in place."""
    operation["description"] = " ".join(operation.get("description", "").split())
    operation["summary"] = operation["description"].split(". ")[0].rstrip(".")
    for parameter in operation.setdefault("parameters", []):
        parameter.setdefault("description", PARAMETER_DESCRIPTIONS.get(parameter["name"], ""))
        parameter["schema"].pop("title", None)
        if parameter["name"] == "model":
            parameter["example"] = settings.served_model_name
    operation["parameters"].append({"$ref": "#/components/parameters/RequestId"})
    if examples := request_examples(path, settings.served_model_name):
        operation["requestBody"]["content"]["application/json"]["examples"] = examples
    _complete_responses(operation["responses"], path, method, settings.requires_key)
    if path in PUBLIC_PATHS and settings.requires_key:
        operation["security"] = []


def _complete_responses(responses: dict[str, Any], path: str, method: str, keys: bool) -> None:
    messages = is_messages_api({"path": path})
    needs_key = keys and path not in PUBLIC_PATHS
    responses.pop("422", None)  # bodies are read by the routes themselves
    statuses = {int(status) for status in responses if status != "200"} | set(COMMON_STATUSES)
    statuses = statuses | {401} if needs_key else statuses - {401}
    for status in statuses:
        shared = {"$ref": f"#/components/responses/{response_name(status, messages=messages)}"}
        own = responses.get(str(status), {}).get("content")
        responses[str(status)] = _own_answer_or_error(status, own, messages=messages) if own else shared
    success = responses["200"]
    success["content"] = {
        kind: media for kind, media in success["content"].items() if media.get("schema")
    }  # what FastAPI adds
    names = ["X-Request-Id", "Request-Id"] if messages else ["X-Request-Id"]
    success["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    if examples := stream_examples(path):
        success["content"]["text/event-stream"]["examples"] = examples
    if method == "post" and path in LINKS:
        success["links"] = LINKS[path]
    ordered = dict(sorted(responses.items()))
    responses.clear()
    responses.update(ordered)


def _own_answer_or_error(status: int, own: dict[str, Any], *, messages: bool) -> dict[str, Any]:
    """A status with an answer of the route's own, which may also be an error of a connection that no route sees."""
    response = error_responses(keys=True)[response_name(status, messages=messages)]
    error = response["content"]["application/json"]["schema"]
    return {
        **response,
        "content": {"application/json": {"schema": {"anyOf": [own["application/json"]["schema"], error]}}},
    }
