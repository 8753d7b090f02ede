"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import ModelInfo
from windlass.server.api.router import ApiRouter, Operation
from windlass.server.app.adapter_registry import ServedAdapter
from windlass.server.app.state import ServerState, state_of
from windlass.server.schemas.response_parts import Model, ModelDraft, ModelList
from windlass.server.serving.response_format import auto_scaling_object, model_rotary_object
from windlass.server.text.reasoning import NONE

router = ApiRouter("Models", "The served model and its adapters.")

# Of the server's settings and of what the engine knows, as `ContextSettings` shows them.
_CONTEXT_DEFAULTS = ("context_overflow", "keep_tokens", "attention_window", "attention_sinks", "cache_reuse")

_CONTEXT_LIMITS = ("shift_context", "max_total_tokens", "shift_refusal", "reuse_refusal")


@router.endpoint("GET", "/v1/models", Operation(response=ModelList))
async def list_models(request: Request) -> Response:
    """The served model, under each of its names, and its adapters."""
    state = state_of(request)
    fields = model_object(state)
    found = [{**fields, "id": name} for name in state.settings.model_names]
    found += [{**fields, **_adapter_fields(state, adapter)} for adapter in state.adapters.listed()]
    found = [_with_anthropic_fields(model) for model in found]
    ends = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return _json({"object": "list", "data": found, **ends})


@router.endpoint("GET", "/v1/models/{model:path}", Operation(response=Model, errors=(404,)))
async def get_model(request: Request, model: Annotated[str, Path(description="Name of a served model.")]) -> Response:
    """The served model by its id."""
    state = state_of(request)
    state.check_model(model)
    adapter = state.adapters.find(model)
    fields = {**model_object(state), "id": model, **({} if adapter is None else _adapter_fields(state, adapter))}
    return _json(_with_anthropic_fields(fields))


def _with_anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """The same with what clients of Anthropic's read of a model."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {**model, "type": "model", "display_name": model["id"], "created_at": created}


def _adapter_fields(state: ServerState, adapter: ServedAdapter) -> dict[str, Any]:
    """What an adapter says beside its model; what the engine knows is null until it has loaded."""
    info = state.adapters.info_of(adapter)
    capabilities = None if info is None else {"rank": info.rank, "targets": info.targets, "num_bytes": info.num_bytes}
    return {
        "id": adapter.source.name,
        "created": adapter.created,
        "parent": state.settings.served_model_name,
        "adapter": capabilities,
    }


def model_object(state: ServerState) -> dict[str, Any]:
    """The model object; what the engine knows is null until it has loaded."""
    info = state.engine.info
    fields: dict[str, Any] = {
        "id": state.settings.served_model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "windlass",
        "parent": None,
        "adapter": None,
    }
    for name in (
        "max_model_len",
        "dtype",
        "weight_dtype",
        "kv_cache_dtype",
        "quantization",
        "architecture",
        "num_parameters",
        "vocab_size",
        "trained_len",
    ):
        fields[name] = None if info is None else getattr(info, name)
    draft = None if info is None else info.draft_model
    fields["draft_model"] = None if draft is None else {name: getattr(draft, name) for name in ModelDraft.model_fields}
    fields["sampling_defaults"] = asdict(state.settings.sampling)
    fields["recommended_sampling"] = dict(state.settings.recommended_sampling) or None
    fields["context"] = {name: getattr(state.settings, name) for name in _CONTEXT_DEFAULTS} | {
        name: None if info is None else getattr(info, name) for name in _CONTEXT_LIMITS
    }
    fields["rotary"] = None if info is None else model_rotary_object(info)
    fields["special_tokens"] = state.tokenizer.special_tokens
    fields["template"] = _template_support(state)
    fields["rotary_auto"] = None if info is None else auto_scaling_object(info)
    fields |= _task_fields(info, supports_infill=state.text.fill_in is not None)
    fields["scored_by"] = None if info is None else _scored_by(info, has_answer_tokens=bool(state.rerank_answer_ids))
    return fields


def _template_support(state: ServerState) -> dict[str, Any] | None:
    """What the chat template can be told; that for tools where there are two."""
    capabilities = state.text.template_capabilities
    if capabilities is None:
        return None
    thinking = state.thinking
    return {
        "tools": capabilities.tools,
        "calls": capabilities.calls,
        "developer": capabilities.developer,
        "thinking": None if thinking.name == NONE else thinking.name,
        "thinking_choices": sorted(thinking.choices),
    }


def _task_fields(info: ModelInfo | None, *, supports_infill: bool) -> dict[str, Any]:
    """What it can be asked for, how vectors are made, and its classes."""
    if info is None:
        return {"tasks": None, "embedding": None, "classes": None}
    pooling, classifier = info.pooling, info.classifier
    generating = ["generate", "infill"] if supports_infill else ["generate"]
    tasks = [*(generating if info.generates else []), "embed"]
    if classifier is not None:
        tasks.append("token_classify" if classifier.per_token else "classify")
    if classifier is None or (len(classifier.labels) == 1 and not classifier.per_token):
        tasks.append("score")
    embedding = {
        "dimensions": info.hidden_size,
        "pooling": None if pooling.refusal is not None else pooling.kind,
        "normalize": pooling.normalize,
        "declared": pooling.declared,
        "refusal": pooling.refusal,
    }
    classes = None
    if classifier is not None:
        classes = {"labels": classifier.labels, "activation": classifier.activation, "per_token": classifier.per_token}
    return {"tasks": tasks, "embedding": embedding, "classes": classes}


def _scored_by(info: ModelInfo, *, has_answer_tokens: bool) -> str | None:
    """What the score of a pair of texts comes from; None: it has none."""
    classifier = info.classifier
    if classifier is not None:
        return "head" if len(classifier.labels) == 1 and not classifier.per_token else None
    return "answer" if has_answer_tokens else "vectors"


def _json(payload: dict[str, Any]) -> Response:
    return Response(to_json(payload), media_type="application/json")
