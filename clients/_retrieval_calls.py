"""The calls of the endpoints that generate nothing. Numbers travel as base64, which is read here. Does no input or output."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx

from windlass.clients._calls import Call, build_body
from windlass.clients._failures import request_id_of
from windlass.clients._parse import parse
from windlass.clients.options import Timeout
from windlass.clients.retrieval_types import Classification, Embeddings, PairScores, PooledStates, Ranking

T = TypeVar("T")


def embeddings(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[Embeddings]:
    body = {"encoding_format": "base64", **build_body(fixed, options, extra)}

    def answer(response: httpx.Response) -> Embeddings:
        data = _object(response)
        for item in _items(data):
            if isinstance(item.get("embedding"), str):
                item["embedding"] = _floats(item["embedding"])
        return parse(Embeddings, data)

    return Call(method="POST", path="/v1/embeddings", body=body, answer=answer, timeout=timeout)


def pooling(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[PooledStates]:
    body = {"encoding_format": "base64", **build_body(fixed, options, extra)}

    def answer(response: httpx.Response) -> PooledStates:
        data = _object(response)
        for item in _items(data):
            item["rows"] = _rows(item.get("data"), item.get("shape"))
        return parse(PooledStates, data)

    return Call(method="POST", path="/pooling", body=body, answer=answer, timeout=timeout)


def score(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[PairScores]:
    return _plain(PairScores, "/v1/score", build_body(fixed, options, extra), timeout)


def rerank(fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout) -> Call[Ranking]:
    return _plain(Ranking, "/v1/rerank", build_body(fixed, options, extra), timeout)


def classify(
    fixed: Mapping[str, Any], options: Mapping[str, Any], extra: Any, timeout: Timeout
) -> Call[Classification]:
    return _plain(Classification, "/classify", build_body(fixed, options, extra), timeout)


def _plain(cls: type[T], path: str, body: dict[str, Any], timeout: Timeout) -> Call[T]:
    return Call(
        method="POST", path=path, body=body, answer=lambda response: parse(cls, _object(response)), timeout=timeout
    )


def _object(response: httpx.Response) -> dict[str, Any]:
    data = response.json()
    if not isinstance(data, dict):
        raise ValueError("the answer should be an object")
    return {**data, "request_id": request_id_of(response)}


def _items(data: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    items = data.get("data")
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else ()


def _rows(values: Any, shape: Any) -> Any:
    """The rows of one text, whether they came as base64, as one row or as several."""
    if isinstance(values, str):
        if not isinstance(shape, list) or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
            raise ValueError("states in base64 should have a shape of rows and values")
        numbers, width = _floats(values), shape[1]
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]
    several = isinstance(values, list) and bool(values) and isinstance(values[0], list)
    return values if several else [values]


def _floats(packed: str) -> list[float]:
    """Little-endian float32."""
    numbers = array("f")
    numbers.frombytes(b64decode(packed, validate=True))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
