"""Only the first error of a body is reported, so validation stops there: a body may have a million wrong items."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from windlass.server import schemas
from windlass.server.schemas.base import StrictModel
from windlass.server.schemas.completions import CompletionRequest
from windlass.server.schemas.responses import ResponseRequest

for found in pkgutil.walk_packages(schemas.__path__, f"{schemas.__name__}."):
    importlib.import_module(found.name)


def models(model: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    for each in model.__subclasses__():
        yield from models(each)
        if each.__name__.endswith("Request"):
            yield each


def unbounded(schema: Any, where: str = "", guarded: bool = False) -> Iterator[str]:
    """Lists and objects that would report every wrong item. An object needs a check before its items."""
    if isinstance(schema, list | tuple):
        for each in schema:
            yield from unbounded(each, where, guarded)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        items = schema.get("items_schema" if kind in ("list", "set", "frozenset") else "values_schema") or {}
        if kind in ("list", "set", "frozenset") and items.get("type", "any") != "any" and not schema.get("fail_fast"):
            yield where
        if kind == "dict" and items.get("type", "any") != "any" and not guarded:
            yield where
        for key, each in schema.items():
            if key == "fields":
                for name, field in each.items():
                    yield from unbounded(field, f"{where}.{name}")
            elif key not in ("metadata", "serialization", "cls"):
                yield from unbounded(each, where, kind == "function-before")


@pytest.mark.parametrize("model", sorted(set(models()), key=lambda model: model.__name__))
def test_request_models_stop_at_the_first_error(model: type[StrictModel]) -> None:
    assert list(unbounded(model.__pydantic_core_schema__)) == []


def test_the_search_finds_lists_and_objects() -> None:
    class Loose(StrictModel):
        texts: list[str]
        numbers: dict[str, int]
        anything: list[Any]

    assert list(unbounded(Loose.__pydantic_core_schema__)) == [".texts", ".numbers"]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (CompletionRequest, {"prompt": "x", "guided_choice": [0] * 10_000}),
        (CompletionRequest, {"prompt": "x", "passages": [0] * 10_000}),
        (ResponseRequest, {"input": "x", "metadata": {str(i): i for i in range(10_000)}}),
    ],
)
def test_many_wrong_items_give_one_error(model: type[StrictModel], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() == 1
