"""OpenAPI declarations of routes that read and write their bodies themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

REF = "#/components/schemas/{model}"


def schema_reference(model: type[BaseModel]) -> dict[str, str]:
    """A JSON reference to a model among the components of the API's description."""
    return {"$ref": REF.format(model=model.__name__)}


def openapi_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_reference(model)}}}}


def query_parameter(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A parameter of the query, for `openapi_extra` of a route that reads it itself."""
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


def openapi_responses(
    answer: type[BaseModel] | None,
    *,
    events: type[BaseModel] | None = None,
    media_type: str = "application/json",
    errors: tuple[int, ...] = (),
    named: bool = False,
    done: bool = True,
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its answer, the events of its stream, and its own errors.

    named: the events have their types as names. done: a last event says so.

    The description of the API adds what any request may be answered with, and says what each error means.
    """
    schema: dict[str, Any] = {"type": "string"} if answer is None else schema_reference(answer)
    content: dict[str, Any] = {media_type: {"schema": schema}}
    if events is not None:
        content["text/event-stream"] = {"schema": _event(events, named=named, done=done)}
    return {200: {"description": "Success", "content": content}, **{status: {"description": ""} for status in errors}}


def _event(events: type[BaseModel], *, named: bool, done: bool) -> dict[str, Any]:
    """The schema of one event, as OpenAPI 3.2 and the tools for 3.1 understand it. Events without names end with `[DONE]`."""
    data: dict[str, Any] = {
        "type": "string",
        "description": "One line of JSON.",
        "contentMediaType": "application/json",
        "contentSchema": schema_reference(events),
    }
    if named:
        name = {"type": "string", "description": "The `type` of its data."}
        properties, required = {"event": name, "data": data}, ["event", "data"]
    elif not done:
        properties, required = {"data": data}, ["data"]
    else:
        last = {"const": "[DONE]", "description": "The last event."}
        either = {"description": "The event's data.", "anyOf": [last, data]}
        properties, required = {"data": either}, ["data"]
    text = "An event. Lines that begin with a colon are comments."
    return {"type": "object", "description": text, "properties": properties, "required": required}


BODY_ERRORS = (400, 404)

GENERATION_ERRORS = (*BODY_ERRORS, 504)
