"""What the routes share: the state behind a request, and how bodies and answers are documented."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from windlass.engine.interface.model_info import ModelInfo
from windlass.server.errors import ApiError, bad_request, unavailable
from windlass.server.exchange.request_id import CALLER
from windlass.server.exchange.state import ServerState
from windlass.server.exchange.streaming import wait_for_disconnect

T = TypeVar("T")

REF = "#/components/schemas/{model}"


def state_of(request: Request) -> ServerState:
    """The state of the app that serves this request."""
    state: ServerState = request.app.state.windlass
    return state


def caller_of(request: Request) -> str:
    """Whose request it is, for taking turns: the API key where keys are asked for, else the address."""
    if state_of(request).settings.asks_for_keys:
        return owner_of(request)
    return request.client.host if request.client is not None else ""


def owner_of(request: Request) -> str:
    """Whose request it is, for what is kept for its caller: a digest of the API key; empty where no keys are asked for."""
    return request.scope.get(CALLER) or ""


def loaded_model(state: ServerState) -> ModelInfo:
    """What the engine has loaded; raises ApiError 503 before it has."""
    info = state.engine.info
    if info is None:
        raise unavailable(
            f"the engine is {state.engine.state}",
            code="engine_unavailable",
            retry_after=state.settings.retry_after_seconds,
        )
    return info


def require_admin(request: Request) -> None:
    """Raise ApiError 403 unless the request's key may do what concerns all callers."""
    if not state_of(request).callers.may_administer(owner_of(request)):
        raise ApiError(403, "this key may not do that: it takes one with admin = true", code="not_an_administrator")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the work is cancelled when the client goes away. Read the request's body before."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise bad_request("the client went away", code="client_disconnected")  # nobody reads it
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def reference(model: type[BaseModel]) -> dict[str, str]:
    """A JSON reference to a model among the components of the API's description."""
    return {"$ref": REF.format(model=model.__name__)}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference(model)}}}}


def query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A parameter of the query, for `openapi_extra` of a route that reads it itself."""
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


def answers(
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
    schema: dict[str, Any] = {"type": "string"} if answer is None else reference(answer)
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
        "contentSchema": reference(events),
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
