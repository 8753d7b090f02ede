"""The schemas of bodies, answers and events, with words for every field. Knows models; knows no routes."""

from __future__ import annotations

from typing import Any

import pydantic.dataclasses  # noqa: F401  # pydantic asks for it when it makes schemas: no request is to wait for an import
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from windlass.server.app.description.asked import ASKED
from windlass.server.app.description.told import TOLD
from windlass.server.protocol.adapters import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from windlass.server.protocol.answers import ErrorAnswer, Model, ModelList, Status, Version
from windlass.server.protocol.chat import ChatCompletion, ChatEvent, ChatRequest
from windlass.server.protocol.completions import Completion, CompletionEvent, CompletionRequest
from windlass.server.protocol.infill import Infill, InfillEvent, InfillRequest
from windlass.server.protocol.looking import AttentionMap, AttentionRequest, CachePages
from windlass.server.protocol.messages.answers import MessageAnswer, MessageError, MessageEvent, TokenCount
from windlass.server.protocol.messages.request import CountTokensRequest, MessageRequest
from windlass.server.protocol.ranking import (
    ClassifyRequest,
    ClassList,
    Reranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from windlass.server.protocol.responses.answers import DeletedResponse, InputTokens, ItemList, ResponseAnswer
from windlass.server.protocol.responses.events import ResponseEvent
from windlass.server.protocol.responses.request import CountInputRequest, ResponseRequest
from windlass.server.protocol.retrieval import EmbeddingList, EmbeddingRequest, PoolingRequest, RowsList
from windlass.server.protocol.rotary import (
    RotaryCurves,
    RotaryCurvesRequest,
    RotaryInspection,
    RotaryInspectRequest,
    RotarySettings,
)
from windlass.server.protocol.text import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TemplateAnswer,
    TemplateRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from windlass.server.routes.common import REF

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


_WORDS = ASKED | TOLD


def schemas() -> dict[str, Any]:
    """The schemas by their names."""
    _, found = models_json_schema([(model, "validation") for model in _MODELS], ref_template=REF)
    known: dict[str, Any] = found["$defs"]
    # Objects of unknown kinds are let through to be refused by name: they are no part of what is taken.
    others = {REF.format(model=name) for name in known if name.startswith("_Other")}
    kept = {name: schema for name, schema in known.items() if REF.format(model=name) not in others}
    for name, schema in kept.items():
        _without(schema, others)
        for field, described in schema.get("properties", {}).items():
            described.pop("title", None)  # it only repeats the name
            if "description" not in described and (text := _WORDS.get(f"{name}.{field}", _WORDS.get(field))):
                described["description"] = text
    return kept


def _without(schema: Any, refs: set[str]) -> None:
    """Take alternatives that refer to these out of a schema, in place."""
    if isinstance(schema, list):
        for item in schema:
            _without(item, refs)
    elif isinstance(schema, dict):
        for key in ("anyOf", "oneOf"):
            if isinstance(alternatives := schema.get(key), list):
                schema[key] = _distinct([item for item in alternatives if item.get("$ref") not in refs])
        for item in schema.values():
            _without(item, refs)


def _distinct(alternatives: list[Any]) -> list[Any]:
    return [item for number, item in enumerate(alternatives) if item not in alternatives[:number]]
