"""Routers whose endpoints declare their models and examples for the OpenAPI document, and small JSON responses.

`FieldNames` translates the field names in errors of requests from other APIs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from windlass.engine.errors import RequestError
from windlass.server.app.auth import CALLER
from windlass.server.errors import ApiError
from windlass.server.schemas.base import StrictModel

BODY_ERRORS = (400, 404)
GENERATION_ERRORS = (*BODY_ERRORS, 504)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Description of an endpoint that reads and writes its bodies itself.

    response: model of the response, None for plain text.
    events: model of the events of its stream; named_events: whether they have an `event:` line; done_event: whether the
    stream ends with `[DONE]`.
    errors: status codes in addition to those of every endpoint.
    unready: description of the status 503 with the same response, for endpoints that report the server's state.
    parameters: query parameters. links: text by operation id, of operations that take the `id` of the response.
    examples: summary and body by name. stream_examples: some events of a stream.
    """

    response: type[BaseModel] | None
    body: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    named_events: bool = False
    done_event: bool = False
    errors: tuple[int, ...] = ()
    unready: str | None = None
    parameters: Sequence[dict[str, Any]] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    examples: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    stream_examples: Sequence[dict[str, Any]] = ()


class LimitedRoute(APIRoute):
    """A route whose requests count toward the limits of their API key, from before the body is read until the answer ends."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):  # answered with 405
            await super().handle(scope, receive, send)
            return
        with scope["app"].state.windlass.callers.running(scope.get(CALLER) or ""):
            await super().handle(scope, receive, send)


class ApiRouter(APIRouter):
    """The endpoints of one tag. description: of the tag. operations: by path and lower-case method."""

    def __init__(self, tag: str, description: str) -> None:
        super().__init__(tags=[tag], route_class=LimitedRoute)
        self.tag = tag
        self.description = description
        self.operations: dict[tuple[str, str], Operation] = {}

    def endpoint(
        self, method: str, path: str, *, aliases: Sequence[str] = (), limited: bool = True, **description: Any
    ) -> Callable[[F], F]:
        """Decorator of a route function. aliases: further paths, which the document omits. description: see `Operation`.

        limited: whether requests count toward the limits of their API key. Only those that report a state which is known
        anyway may be free.
        """
        route_class = LimitedRoute if limited else APIRoute
        self.operations[path.replace(":path}", "}"), method.lower()] = Operation(**description)

        def decorate(function: F) -> F:
            for alias in aliases:
                self.add_api_route(
                    alias, function, methods=[method], include_in_schema=False, route_class_override=route_class
                )
            self.add_api_route(path, function, methods=[method], route_class_override=route_class)
            return function

        return decorate


def json_response(answer: StrictModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Response with the JSON text of a small model."""
    return Response(answer.json_bytes(), status_code=status, media_type="application/json", headers=headers)


EXAMPLE_USAGE = {
    "prompt_tokens": 6,
    "completion_tokens": 2,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def example_chunk(prefix: str, kind: str, *choices: dict[str, Any]) -> dict[str, Any]:
    """A chunk of an OpenAI stream for the document; without choices, the last one with the usage."""
    return {
        "id": f"{prefix}-1",
        "object": kind,
        "created": 1767225600,
        "model": "demo",
        "system_fingerprint": "fp_4f1d2c3b5a697887",
        "choices": list(choices),
        "usage": None if choices else EXAMPLE_USAGE,
    }


def query_parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    """A query parameter that its route reads itself."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.(\w+))?.*")


class FieldNames:
    """Names of fields in the original API.

    names: by the name in the translated request. message_paths: path in the original body, by message of the chat.
    message_fields: by the name of a field of a chat message; "" means the path itself.
    """

    def __init__(
        self, names: Mapping[str, str], message_paths: Sequence[str], message_fields: Mapping[str, str]
    ) -> None:
        self._names = names
        self._message_paths = message_paths
        self._message_fields = message_fields

    @contextmanager
    def renamed_errors(self) -> Iterator[None]:
        """Rename the fields in errors that are raised inside."""
        try:
            yield
        except ApiError as error:
            if error.param is not None or error.status == 400:
                error.message, error.param = self._rename(error.message, error.param)
            raise
        except RequestError as error:
            error.message, error.param = self._rename(error.message, error.param)
            raise

    def _rename(self, message: str, param: str | None) -> tuple[str, str | None]:
        found = None if param is None else _MESSAGE.fullmatch(param)
        if found is not None and param is not None:
            place = self._message_paths[min(int(found[1]), len(self._message_paths) - 1)]
            part = self._message_fields.get(found[2] or "", "")
            here = f"{place}.{part}" if part else place
            message, param = message.replace(param, here), here
        elif param is not None:
            param = self._names.get(param, param)
        for theirs, ours in self._names.items():
            message = re.sub(rf"(?<![\w.]){theirs}(?![\w])", ours, message)
        return message, param
