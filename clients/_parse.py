"""Response dataclasses from JSON by their type hints, and JSON schemas of answer types."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


def loads(text: str) -> Any:
    """`json.loads` that raises nothing but ValueError, also for what is nested deeper than Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("this JSON is nested too deeply") from None


def parse(cls: type[T], data: Any, *, keep_nulls: bool = False) -> T:
    """An instance of the dataclass `cls` from a JSON object; raises ValueError that names the field at fault.

    nulls: whether a null is stored as None in a field that takes it. Otherwise it is the same as an absent key, as servers
    write the one or the other: the field's default.
    """
    reader: Callable[[Any, str], T] = _reader(typing.cast(Any, cls), keep_nulls)
    return reader(data, cls.__name__)


@functools.cache
def _reader(hint: Any, keep_nulls: bool) -> Callable[[Any, str], Any]:
    if hint is Any:
        return lambda value, where: value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _union_reader(get_args(hint), keep_nulls)
    if dataclasses.is_dataclass(hint):
        return _dataclass_reader(typing.cast(type, hint), keep_nulls)
    if origin is tuple:
        return _tuple_reader(get_args(hint), keep_nulls)
    if origin is list:
        return _list_reader(_reader(get_args(hint)[0], keep_nulls))
    if origin is Literal:
        return _literal_reader(get_args(hint))
    if origin is dict and get_args(hint)[1] is not Any:
        return _mapping_reader(_reader(get_args(hint)[1], keep_nulls))
    plain: Any = (int, float) if hint is float else (dict if origin is dict else hint)

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, plain) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{where} should be of type {getattr(hint, '__name__', hint)}")
        try:
            return float(value) if hint is float else value
        except OverflowError:  # a whole number beyond all floats
            raise ValueError(f"{where} is too large for a number of type float") from None

    return check


def _union_reader(options: tuple[Any, ...], keep_nulls: bool) -> Callable[[Any, str], Any]:
    optional = type(None) in options
    readers = [_reader(option, keep_nulls) for option in options if option is not type(None)]

    def read(value: Any, where: str) -> Any:
        if value is None and optional:
            return None
        for reader in readers[:-1]:
            try:
                return reader(value, where)
            except ValueError:
                continue
        return readers[-1](value, where)

    return read


def _tuple_reader(items: tuple[Any, ...], keep_nulls: bool) -> Callable[[Any, str], Any]:
    variable = len(items) == 2 and items[1] is Ellipsis
    readers = [_reader(item, keep_nulls) for item in (items[:1] if variable else items)]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list) or (not variable and len(value) != len(readers)):
            raise ValueError(f"{where} should be a list{'' if variable else f' of {len(readers)}'}")
        if variable:
            return tuple([readers[0](item, where) for item in value])
        return tuple([reader(item, where) for reader, item in zip(readers, value, strict=True)])

    return read


def _list_reader(reader: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"{where} should be a list")
        return [reader(item, where) for item in value]

    return read


def _literal_reader(choices: tuple[Any, ...]) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return value
        raise ValueError(f"{where} should be one of {', '.join(map(repr, choices))}")

    return read


def _mapping_reader(reader: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} should be an object")
        return {name: reader(item, f"{where}.{name}") for name, item in value.items()}

    return read


def _dataclass_reader(cls: type, keep_nulls: bool) -> Callable[[Any, str], Any]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    fields = [
        (
            field.name,
            _reader(hints[field.name], keep_nulls),
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(cls)
        if field.init and not field.name.startswith("_")
    ]
    nullable = {name for name, reader, _ in fields if keep_nulls and _accepts_null(reader)}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} should be an object")
        found: dict[str, Any] = {}
        for name, reader, required in fields:
            item = value.get(name)
            if item is not None or (name in nullable and name in value):  # else null is as absent: the default
                found[name] = reader(item, f"{where}.{name}")
            elif required:
                raise ValueError(f"{where}.{name} is missing")
        return cls(**found)

    return read


def _accepts_null(reader: Callable[[Any, str], Any]) -> bool:
    try:
        reader(None, "")
    except ValueError:
        return False
    return True


AnswerType = Mapping[str, Any] | type

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


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
    return lambda text: parse(answer_type, loads(text), keep_nulls=True)


def _schema(answer_type: AnswerType) -> dict[str, Any]:
    if isinstance(answer_type, Mapping):
        return dict(answer_type)
    if hasattr(answer_type, "model_json_schema"):
        schema: dict[str, Any] = answer_type.model_json_schema()
        return schema
    if not (isinstance(answer_type, type) and dataclasses.is_dataclass(answer_type)):
        raise TypeError("answer_type should be a JSON Schema, a pydantic model or a dataclass")
    return _hint_schema(answer_type, ())


def _hint_schema(hint: Any, enclosing: tuple[Any, ...]) -> dict[str, Any]:
    """The schema of a type hint. inside: the dataclasses around it."""
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin, items = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_hint_schema(item, enclosing) for item in items]}
    if origin is Literal:
        return {"enum": list(items)}
    if origin is list or (origin is tuple and len(items) == 2 and items[1] is Ellipsis):
        return {"type": "array", "items": _hint_schema(items[0], enclosing)}
    if origin is dict and items[0] is str:
        return {"type": "object", "additionalProperties": _hint_schema(items[1], enclosing)}
    if dataclasses.is_dataclass(hint) and hint not in enclosing:
        return _dataclass_schema(hint, (*enclosing, hint))
    raise TypeError(
        f"answer_type: {getattr(hint, '__name__', hint)} has no JSON Schema here: give one, or a pydantic model"
    )


def _dataclass_schema(cls: Any, enclosing: tuple[Any, ...]) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise TypeError(f"answer_type: {cls.__name__} must stand at the top of its module ({error})") from error
    fields = [field for field in dataclasses.fields(cls) if field.init]
    missing = dataclasses.MISSING
    return {
        "type": "object",
        "properties": {field.name: _hint_schema(hints[field.name], enclosing) for field in fields},
        "required": [field.name for field in fields if field.default is missing and field.default_factory is missing],
        "additionalProperties": False,
    }
