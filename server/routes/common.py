"""What the routes share: the state behind a request, and how bodies and answers are documented."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive

from windlass.server.errors import bad_request
from windlass.server.exchange.request_id import CALLER
from windlass.server.exchange.state import ServerState
from windlass.server.protocol.answers import ErrorAnswer

T = TypeVar("T")

REF = "#/components/schemas/{model}"


def state_of(request: Request) -> ServerState:
    """The state of the app that serves this request."""
    state: ServerState = request.app.state.windlass
    return state


def caller_of(request: Request) -> str:
    """Whose request it is, for taking turns: the API key where keys are asked for, else the address."""
    if state_of(request).settings.api_keys:
        return owner_of(request)
    return request.client.host if request.client is not None else ""


def owner_of(request: Request) -> str:
    """Whose request it is, for what is kept for its caller: a digest of the API key; empty where no keys are asked for."""
    return request.scope.get(CALLER) or ""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the work is cancelled when the client goes away. Read the request's body before."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise bad_request("the client went away", code="client_disconnected")  # nobody reads it
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def reference(model: type[BaseModel]) -> dict[str, str]:
    """A JSON reference to a model among the components of the API's description."""
    return {"$ref": REF.format(model=model.__name__)}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference(model)}}}}


def answers(
    answer: type[BaseModel] | None,
    *,
    stream: bool = False,
    media_type: str = "application/json",
    errors: tuple[int, ...] = (),
    error: type[BaseModel] = ErrorAnswer,
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its answer, its stream, and its errors, which have the shape of `error`."""
    schema: dict[str, Any] = {"type": "string"} if answer is None else reference(answer)
    content: dict[str, Any] = {media_type: {"schema": schema}}
    if stream:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "`data:` lines with one JSON object each, then `data: [DONE]`"}
        }
    documented: dict[int | str, dict[str, Any]] = {200: {"description": "Success", "content": content}}
    for status in (401, *errors):
        documented[status] = {
            "description": _MEANING[status],
            "content": {"application/json": {"schema": reference(error)}},
        }
    return documented


_MEANING = {
    400: "The request is at fault; `param` names the field",
    401: "A valid API key is needed",
    404: "There is no such model",
    408: "The body did not come in time",
    413: "The body is too large",
    429: "Too many requests; see Retry-After",
    431: "The headers are too large",
    500: "The server failed",
    503: "The engine is not ready, or the server is shutting down; see Retry-After",
    504: "The deadline passed",
}
BODY_ERRORS = (400, 404, 408, 413, 431, 500)
GENERATION_ERRORS = (*BODY_ERRORS, 429, 503, 504)
