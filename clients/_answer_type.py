"""What a caller wants an answer to be: from a JSON Schema, a pydantic model or a dataclass to the schema and its reader.

pydantic is not imported: a class with its two methods is taken for one of its models.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from windlass.clients._parse import loads, parse

AnswerType = Mapping[str, Any] | type

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def response_format(answer_type: AnswerType) -> dict[str, Any]:
    """The body's field; raises TypeError for what cannot be described."""
    name = getattr(answer_type, "__name__", None) or "answer"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
    # What a model of pydantic asks for it checks itself: a keyword that no grammar holds, as the `uniqueItems` of a set, is no
    # reason to refuse it. Nobody checks an answer under a schema.
    strict = not hasattr(answer_type, "model_validate_json")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _schema(answer_type), "strict": strict}}


def reader(answer_type: AnswerType) -> Callable[[str], Any]:
    """From the text of an answer to the value; that raises ValueError where the text does not hold."""
    if isinstance(answer_type, Mapping):
        return loads
    if hasattr(answer_type, "model_validate_json"):
        validate: Callable[[str], Any] = answer_type.model_validate_json
        return validate
    return lambda text: parse(answer_type, loads(text), nulls=True)


def _schema(answer_type: AnswerType) -> dict[str, Any]:
    if isinstance(answer_type, Mapping):
        return dict(answer_type)
    if hasattr(answer_type, "model_json_schema"):
        schema: dict[str, Any] = answer_type.model_json_schema()
        return schema
    if not (isinstance(answer_type, type) and dataclasses.is_dataclass(answer_type)):
        raise TypeError("answer_type should be a JSON Schema, a pydantic model or a dataclass")
    return _of_hint(answer_type, ())


def _of_hint(hint: Any, inside: tuple[Any, ...]) -> dict[str, Any]:
    """The schema of a type hint. inside: the dataclasses around it."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, items = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of_hint(item, inside) for item in items]}
    if origin is Literal:
        return {"enum": list(items)}
    if origin is list or (origin is tuple and len(items) == 2 and items[1] is Ellipsis):
        return {"type": "array", "items": _of_hint(items[0], inside)}
    if origin is dict and items[0] is str:
        return {"type": "object", "additionalProperties": _of_hint(items[1], inside)}
    if dataclasses.is_dataclass(hint) and hint not in inside:
        return _of_dataclass(hint, (*inside, hint))
    raise TypeError(
        f"answer_type: {getattr(hint, '__name__', hint)} has no JSON Schema here: give one, or a pydantic model"
    )


def _of_dataclass(cls: Any, inside: tuple[Any, ...]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise TypeError(f"answer_type: {cls.__name__} must stand at the top of its module ({error})") from error
    fields = [field for field in dataclasses.fields(cls) if field.init]
    absent = dataclasses.MISSING
    return {
        "type": "object",
        "properties": {field.name: _of_hint(hints[field.name], inside) for field in fields},
        "required": [field.name for field in fields if field.default is absent and field.default_factory is absent],
        "additionalProperties": False,
    }
