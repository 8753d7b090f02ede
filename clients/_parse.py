"""Response dataclasses from JSON by their type hints and back, and JSON schemas of answer types."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
AnswerType = Mapping[str, Any] | type
Reader = Callable[[Any, str], Any]  # of a JSON value and the name of its place, for errors

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class ResponseModel:
    """Base of responses, their parts and the events of streams. Its subclasses become frozen dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # for type checkers

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, nested ones too. Fields that are None are left out."""
        return _fields_to_dict(self)

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=indent)

    def _to_request(self) -> Any:
        """The value in the form that a request accepts."""
        return self.to_dict()


def _fields_to_dict(model: Any) -> dict[str, Any]:
    # Nested models are converted by their fields even if their own `to_dict` returns the form of a request.
    found = {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.name[0] != "_"}
    return {name: _value_to_json(value) for name, value in found.items() if value is not None}


def _value_to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields_to_dict(value)
    if isinstance(value, Mapping):
        return {name: _value_to_json(item) for name, item in value.items()}
    return [_value_to_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def to_json_value(value: Any) -> Any:
    """Convert a value of a request: iterables and numpy arrays to lists, response models to the form of a request."""
    if isinstance(value, ResponseModel):
        return value._to_request()
    for method in ("to_dict", "tolist"):  # of openai's models, of numpy's arrays and scalars
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, Mapping):
        return {name: to_json_value(item) for name, item in value.items()}
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        return value
    return [to_json_value(item) for item in value]


def loads(text: str) -> Any:
    """`json.loads` that raises only ValueError, also for JSON that is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("this JSON is nested too deeply") from None


def parse(cls: type[T], data: Any, *, keep_nulls: bool = False) -> T:
    """Parse a JSON object into the dataclass `cls`; raises ValueError that names the field.

    keep_nulls: store null as None in a field that allows it. Otherwise null means the same as an absent key, because servers
    write either: the field gets its default.
    """
    read: Callable[[Any, str], T] = _reader(typing.cast(Any, cls), keep_nulls)
    return read(data, cls.__name__)


@functools.cache
def _reader(hint: Any, keep_nulls: bool) -> Reader:
    if hint is Any:
        return lambda value, where: value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union_reader(arguments, keep_nulls)
    if dataclasses.is_dataclass(hint):
        return _dataclass_reader(typing.cast(type, hint), keep_nulls)
    if origin in (list, tuple):
        return _sequence_reader(origin, arguments, keep_nulls)
    if origin is Literal:
        return _literal_reader(arguments)
    if origin is dict and arguments[1] is not Any:
        return _mapping_reader(_reader(arguments[1], keep_nulls))
    plain: Any = (int, float) if hint is float else (dict if origin is dict else hint)

    def check(value: Any, where: str) -> Any:
        if not isinstance(value, plain) or (isinstance(value, bool) and hint is not bool):
            raise ValueError(f"{where} should be of type {getattr(hint, '__name__', hint)}")
        try:
            return float(value) if hint is float else value
        except OverflowError:  # an integer beyond the range of floats
            raise ValueError(f"{where} is too large for a number of type float") from None

    return check


def _union_reader(options: tuple[Any, ...], keep_nulls: bool) -> Reader:
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


def _sequence_reader(kind: type, items: tuple[Any, ...], keep_nulls: bool) -> Reader:
    fixed = kind is tuple and not (len(items) == 2 and items[1] is Ellipsis)
    readers = [_reader(item, keep_nulls) for item in (items if fixed else items[:1])]
    expected = f"a list of {len(readers)}" if fixed else "a list"

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list) or (fixed and len(value) != len(readers)):
            raise ValueError(f"{where} should be {expected}")
        if fixed:
            return tuple([reader(item, where) for reader, item in zip(readers, value, strict=True)])
        return kind([readers[0](item, where) for item in value])

    return read


def _literal_reader(choices: tuple[Any, ...]) -> Reader:
    def read(value: Any, where: str) -> Any:
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return value
        raise ValueError(f"{where} should be one of {', '.join(map(repr, choices))}")

    return read


def _mapping_reader(reader: Reader) -> Reader:
    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} should be an object")
        return {name: reader(item, f"{where}.{name}") for name, item in value.items()}

    return read


def _dataclass_reader(cls: type, keep_nulls: bool) -> Reader:
    hints = typing.get_type_hints(cls)
    fields = [
        (field.name, _scalar_types(hints[field.name]), _reader(hints[field.name], keep_nulls), _is_required(field))
        for field in dataclasses.fields(cls)
        if field.init and not field.name.startswith("_")
    ]
    nullable = {name for name, _, reader, _ in fields if keep_nulls and _accepts_null(reader)}

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} should be an object")
        found: dict[str, Any] = {}
        for name, scalars, reader, required in fields:
            item = value.get(name)
            if type(item) in scalars:  # the most common case; spares the chunks of a stream the call and the name
                found[name] = item
            elif item is not None or (name in nullable and name in value):
                found[name] = reader(item, f"{where}.{name}")
            elif required:
                raise ValueError(f"{where}.{name} is missing")
        return cls(**found)

    return read


def _scalar_types(hint: Any) -> frozenset[type]:
    """Types whose values a hint accepts unchanged."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return frozenset((str, int, float, bool)).intersection(options)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _accepts_null(reader: Reader) -> bool:
    try:
        reader(None, "")
    except ValueError:
        return False
    return True


def response_format(answer_type: AnswerType) -> dict[str, Any]:
    """The `response_format` of a request; raises TypeError for a type without a JSON Schema."""
    name = getattr(answer_type, "__name__", None) or "answer"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
    # A pydantic model validates the answer itself, so its schema may have keywords that no grammar can enforce, such as
    # `uniqueItems` of a set. With any other schema the server must refuse them.
    strict = not hasattr(answer_type, "model_validate_json")
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _schema(answer_type), "strict": strict}}


def answer_reader(answer_type: AnswerType) -> Callable[[str], Any]:
    """A function from the text of an answer to its value; it raises ValueError for text that does not match."""
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
    """The schema of a type hint. enclosing: the dataclasses that contain it."""
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
        raise TypeError(f"answer_type: define {cls.__name__} at the top level of its module ({error})") from error
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return {
        "type": "object",
        "properties": {field.name: _hint_schema(hints[field.name], enclosing) for field in fields},
        "required": [field.name for field in fields if _is_required(field)],
        "additionalProperties": False,
    }
