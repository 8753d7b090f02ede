"""`GET /v1/models` and `/v1/models/{id}`, and loading and unloading of adapters."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import ConfigDict, Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import ModelInfo
from windlass.server.api.router import BODY_ERRORS, ApiRouter
from windlass.server.app.adapter_registry import ServedAdapter
from windlass.server.app.request_body import read_body
from windlass.server.app.state import ServerState, require_admin, state_of
from windlass.server.schemas.base import StrictModel, optional
from windlass.server.schemas.response_parts import EffectiveLength, ScalingValue
from windlass.server.serving.request_rotation import auto_scaling_object, model_rotary_object
from windlass.server.serving.streaming import run_while_connected
from windlass.server.text.reasoning import NONE

router = ApiRouter("Models", "The served model and its adapters.")
adapters_router = ApiRouter("Adapters", "LoRA adapters, loaded and unloaded while the server runs.")

# Fields of `ContextSettings` from the server's settings, and from the engine.
_CONTEXT_DEFAULTS = ("context_overflow", "keep_tokens", "attention_window", "attention_sinks", "cache_reuse")
_CONTEXT_LIMITS = ("shift_context", "max_total_tokens", "shift_refusal", "reuse_refusal")


class ContextSettings(StrictModel):
    """Context rules of requests that do not set them, and limits of sequences that drop tokens."""

    context_overflow: Annotated[str, Field(description="`error`, `stop`, `shift` or `drop_turns`.")]
    keep_tokens: int | None = optional(
        "Number of leading tokens that `shift` never drops. Null: a chat's system prompt, else 16 tokens."
    )
    attention_window: int | None = optional("Number of tokens that each token attends to. Null: all.")
    attention_sinks: int | None = optional("Number of leading tokens that each token also attends to.")
    cache_reuse: int = Field(
        description="Minimum length of passages reused from other positions, in tokens. 0: no reuse."
    )
    shift_context: int | None = optional(
        "With `shift`: number of tokens that a sequence holds at once. Null until the model has loaded."
    )
    max_total_tokens: int | None = optional(
        "With `shift`: maximum number of tokens of prompt and answer. Null: unlimited."
    )
    shift_refusal: str | None = optional("Why this model does not support `shift`. Null: it does.")
    reuse_refusal: str | None = optional("Why this model does not support `cache_reuse`. Null: it does.")


class ModelDraft(StrictModel):
    """Draft model or MTP layer."""

    architecture: str = Field(description="Architecture of the model.")
    quantization: str | None = Field(description="Quantization of the weights. Null: none.")
    weight_dtype: str = Field(description="Data type of stored weights.")
    num_parameters: int = Field(description="Number of weights.")
    num_tokens: int = Field(description="Maximum number of tokens proposed per stream and step.")


class ModelRotaryGroup(StrictModel):
    """A rotary scaling with its parameters, and the dimensions that it applies to."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, ScalingValue]

    rope_type: str = Field(description="Kind of the scaling.")
    rotary_dim: int = Field(description="Number of rotated dimensions per head.")
    original_max_position_embeddings: int = Field(description="Original context of the scaling, in tokens.")
    max_position_embeddings: int = Field(description="Context that the model was trained for, in tokens.")


class ModelRotary(ModelRotaryGroup):
    """The main group's scaling, and the scaling of every group of layers."""

    groups: dict[str, ModelRotaryGroup] = Field(description="Scaling per group of layers.")


class RotaryStep(StrictModel):
    """A scaling that `auto` can choose."""

    up_to: int | None = Field(description="Maximum number of tokens of prompt and output. Null: unlimited.")
    rope_scaling: dict[str, ScalingValue] = Field(description="Scaling of requests up to this length.")
    effective_length: EffectiveLength
    profile: str | None = optional("Profile of the step, if the operator's thresholds name one.")


class RotaryLadderShown(StrictModel):
    """Scalings that `rope_scaling: auto` chooses from."""

    default: bool = Field(description="Whether requests that set no scaling use `auto`.")
    steps: list[RotaryStep] = Field(
        description="Steps, shortest first. A request gets the first step that is long enough."
    )


class SamplingSettings(StrictModel):
    """Defaults of the sampling parameters."""

    temperature: float = Field(description="Sampling temperature. 0 selects the most likely token.")
    top_k: int = Field(description="Only this many of the most likely tokens are sampled. 0 or -1: all tokens.")
    top_p: float = Field(
        description="Nucleus sampling: only the most likely tokens whose probabilities add up to this value are "
        "sampled. 1: all tokens."
    )
    min_p: float = Field(
        description="Only tokens with at least this share of the highest probability are sampled. 0: all tokens."
    )
    typical_p: float = Field(
        description="Locally typical sampling: as `top_p`, with the most typical tokens. 1: all tokens."
    )
    repetition_penalty: float = Field(
        description="Divides positive logits of tokens that already occurred and multiplies negative ones. 1: off."
    )


class AdapterFacts(StrictModel):
    """Properties of a LoRA adapter."""

    rank: int = Field(description="Largest rank of its matrices.")
    targets: list[str] = Field(description="Kinds of layers that it changes.")
    num_bytes: int = Field(description="Memory in bytes.")


class EmbeddingFacts(StrictModel):
    """Defaults of `/v1/embeddings`."""

    dimensions: int = Field(description="Number of values of a vector.")
    pooling: Literal["last", "mean", "first"] | None = Field(
        description="Default of `pooling`. Null: requests must set it, because of `refusal`."
    )
    normalize: bool = Field(description="Whether vectors are normalized to length 1.")
    declared: bool = Field(description="Whether the model's files define the pooling.")
    refusal: str | None = Field(description="Pooling of the model's files that is not supported. Null: none.")


class TemplateSupport(StrictModel):
    """Capabilities of a chat template, as far as its text shows them."""

    tools: bool = Field(description="Whether the template shows offered functions to the model.")
    calls: bool = Field(description="Whether the template renders calls and their results.")
    call_format: str | None = Field(
        description="Format in which tool calls are read from answers, a value of `--tool-call-parser`. Null: the template "
        "shows functions, but its format is not known, so only calls in plain JSON are recognized."
    )
    developer: bool = Field(description="Whether the template distinguishes the role `developer` from `system`.")
    thinking: str | None = Field(description="Format by which thinking is recognized in answers. Null: none.")
    thinking_choices: list[str] = Field(description="Template variables that control the amount of thinking.")


class ClassFacts(StrictModel):
    """Classes of a classification model."""

    labels: list[str] = Field(description="Names of the classes, in the order of the probabilities.")
    activation: Literal["softmax", "sigmoid", "none"] = Field(
        description="Function that turns the head's logits into probabilities."
    )
    per_token: bool = Field(description="Whether the model classifies tokens instead of texts.")


class Model(StrictModel):
    """The served model or one of its adapters. Values of the engine are null until the model has loaded."""

    id: str = Field(description="Name of the model.")
    object: Literal["model"]
    type: Literal["model"]
    display_name: str = Field(description="Same as `id`.")
    created: int = Field(description="Creation time in Unix seconds.")
    created_at: str = Field(description="Creation time in RFC 3339 format.")
    owned_by: str = Field(description="Always `windlass`.")
    max_model_len: int | None = Field(description="Context length in tokens. Null until the model has loaded.")
    dtype: str | None = Field(description="Data type of computations. Null until the model has loaded.")
    weight_dtype: str | None = Field(description="Data type of stored weights. Null until the model has loaded.")
    kv_cache_dtype: str | None = Field(
        description="Data type of cached keys and values. Null until the model has loaded."
    )
    quantization: str | None = Field(description="Quantization of the weights. Null: none.")
    architecture: str | None = Field(description="Architecture of the model. Null until it has loaded.")
    num_parameters: int | None = Field(description="Number of weights. Null until the model has loaded.")
    draft_model: ModelDraft | None = Field(description="Draft model or MTP layer that proposes tokens. Null: none.")
    sampling_defaults: SamplingSettings = Field(description="Sampling parameters of requests that do not set them.")
    recommended_sampling: dict[str, float] | None = Field(
        description="Values of `sampling_defaults` that the model's authors recommend. Null: none."
    )
    attention_maps: bool = Field(description="Whether `/v1/attention` is enabled (`--attention-maps`).")
    context: ContextSettings = Field(description="Context rules of requests that do not set them.")
    rotary: ModelRotary | None = Field(
        description="Rotary scaling of requests that set none. Null until the model has loaded, and for a model "
        "without rotary attention."
    )
    rotary_auto: RotaryLadderShown | None = Field(
        description="Scalings that `rope_scaling: auto` chooses from. Null until the model has loaded, and if "
        "it cannot be scaled."
    )
    tasks: list[Literal["generate", "infill", "embed", "score", "classify", "token_classify"]] | None = Field(
        description="Supported tasks. Null until the model has loaded."
    )
    scored_by: Literal["answer", "head", "vectors"] | None = Field(
        description="Source of scores and rankings: the answer token of the model, a head with one class, or "
        "the cosine of vectors. Null: not supported."
    )
    embedding: EmbeddingFacts | None = Field(
        description="How embeddings are computed. Null until the model has loaded."
    )
    classes: ClassFacts | None = Field(description="Classes of a classification model. Null: it has none.")
    vocab_size: int | None = Field(description="Number of token ids. Null until the model has loaded.")
    trained_len: int | None = Field(
        description="Context that the model was trained for, in tokens, before any scaling. Null until it has loaded."
    )
    special_tokens: dict[str, str] = Field(description="Texts of special tokens by name, such as `bos_token`.")
    template: TemplateSupport | None = Field(description="Capabilities of the chat template. Null: the model has none.")
    parent: str | None = Field(description="Of a LoRA adapter: the model that it changes. Else null.")
    adapter: AdapterFacts | None = Field(
        description="Properties of a LoRA adapter. Null for the model itself and until the model has loaded."
    )


class ModelList(StrictModel):
    """The served model under each of its names, and its adapters."""

    object: Literal["list"]
    data: list[Model] = Field(description="The entries.")
    has_more: Literal[False] = Field(description="Always false: the list is complete.")
    first_id: str = Field(description="Id of the first entry. Null if there is none.")
    last_id: str = Field(description="Id of the last entry. Null if there is none.")


@router.endpoint("GET", "/v1/models", limited=False, response=ModelList)
async def list_models(request: Request) -> Response:
    """List the served model under each of its names, and its adapters."""
    state = state_of(request)
    fields = await model_object(state)
    found = [{**fields, "id": name} for name in state.settings.model_names]
    found += [{**fields, **_adapter_fields(state, adapter)} for adapter in state.adapters.listed()]
    found = [_with_anthropic_fields(model) for model in found]
    ends = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return _json({"object": "list", "data": found, **ends})


@router.endpoint("GET", "/v1/models/{model:path}", limited=False, response=Model, errors=(404,))
async def get_model(request: Request, model: Annotated[str, Path(description="Name of a served model.")]) -> Response:
    """Describe the served model or an adapter."""
    state = state_of(request)
    state.check_model(model)
    adapter = state.adapters.find(model)
    fields = {**await model_object(state), "id": model, **({} if adapter is None else _adapter_fields(state, adapter))}
    return _json(_with_anthropic_fields(fields))


def _with_anthropic_fields(model: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that Anthropic's clients read."""
    created = datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {**model, "type": "model", "display_name": model["id"], "created_at": created}


def _adapter_fields(state: ServerState, adapter: ServedAdapter) -> dict[str, Any]:
    """Fields of an adapter that differ from its model's. Values of the engine are null until it has loaded."""
    info = state.adapters.info_of(adapter)
    facts = None
    if info is not None:
        facts = AdapterFacts(rank=info.rank, targets=list(info.targets), num_bytes=info.num_bytes)
    return {
        "id": adapter.source.name,
        "created": adapter.created,
        "parent": state.settings.served_model_name,
        "adapter": facts,
    }


async def model_object(state: ServerState) -> dict[str, Any]:
    """The model object. Values of the engine are null until the model has loaded."""
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
        *("max_model_len", "dtype", "weight_dtype", "kv_cache_dtype", "quantization", "architecture"),
        *("num_parameters", "vocab_size", "trained_len"),
    ):
        fields[name] = None if info is None else getattr(info, name)
    draft = None if info is None else info.draft_model
    fields["draft_model"] = None if draft is None else ModelDraft.model_validate(draft, from_attributes=True)
    fields["sampling_defaults"] = asdict(state.settings.sampling)
    fields["attention_maps"] = state.settings.attention_maps
    fields["recommended_sampling"] = dict(state.settings.recommended_sampling) or None
    fields["context"] = {name: getattr(state.settings, name) for name in _CONTEXT_DEFAULTS} | {
        name: None if info is None else getattr(info, name) for name in _CONTEXT_LIMITS
    }
    fields["rotary"] = None if info is None else model_rotary_object(info)
    fields["special_tokens"] = state.tokenizer.special_tokens
    fields["template"] = await _template_support(state)
    fields["rotary_auto"] = None if info is None else auto_scaling_object(info)
    fields |= _task_fields(info, supports_infill=state.text.fill_in is not None)
    fields["scored_by"] = None if info is None else _scored_by(info, has_answer_tokens=bool(state.rerank_answer_ids))
    return fields


async def _template_support(state: ServerState) -> TemplateSupport | None:
    """Capabilities of the chat template; of the one for tools if there are two."""
    capabilities = await state.text.template_capabilities(tools=True)
    if capabilities is None:
        return None
    thinking = state.thinking
    return TemplateSupport(
        tools=capabilities.tools,
        calls=capabilities.calls,
        call_format=state.text.call_format(capabilities),
        developer=capabilities.developer,
        thinking=None if thinking.name == NONE else thinking.name,
        thinking_choices=sorted(thinking.choices),
    )


def _task_fields(info: ModelInfo | None, *, supports_infill: bool) -> dict[str, Any]:
    """Supported tasks, defaults of embeddings, and classes."""
    if info is None:
        return {"tasks": None, "embedding": None, "classes": None}
    pooling, classifier = info.pooling, info.classifier
    generating = ["generate", "infill"] if supports_infill else ["generate"]
    tasks = [*(generating if info.generates else []), "embed"]
    if classifier is not None:
        tasks.append("token_classify" if classifier.per_token else "classify")
    if classifier is None or (len(classifier.labels) == 1 and not classifier.per_token):
        tasks.append("score")
    embedding = EmbeddingFacts.model_construct(
        dimensions=info.hidden_size,
        pooling=None if pooling.refusal is not None else pooling.kind,
        normalize=pooling.normalize,
        declared=pooling.declared,
        refusal=pooling.refusal,
    )
    classes = None
    if classifier is not None:
        classes = ClassFacts(
            labels=list(classifier.labels), activation=classifier.activation, per_token=classifier.per_token
        )
    return {"tasks": tasks, "embedding": embedding, "classes": classes}


def _scored_by(info: ModelInfo, *, has_answer_tokens: bool) -> str | None:
    """Source of the scores of text pairs, None if not supported."""
    classifier = info.classifier
    if classifier is not None:
        return "head" if len(classifier.labels) == 1 and not classifier.per_token else None
    return "answer" if has_answer_tokens else "vectors"


def _json(payload: dict[str, Any]) -> Response:
    return Response(to_json(payload), media_type="application/json")


AdapterName = Annotated[str, Field(min_length=1, max_length=128)]


_ERRORS = (*BODY_ERRORS, 403)


class LoadAdapterRequest(StrictModel):
    """The adapter to load."""

    lora_name: AdapterName = Field(description="Name of the adapter, which requests give as their `model`.")
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="Directory in PEFT's format, inside the server's adapter folder or relative to it."
    )


class UnloadAdapterRequest(StrictModel):
    """The adapter to unload."""

    lora_name: AdapterName = Field(description="Name of the adapter, which requests give as their `model`.")


class AdapterAnswer(StrictModel):
    """State of the adapter."""

    id: str = Field(description="Name of the adapter.")
    object: Literal["lora_adapter"] = "lora_adapter"
    status: Literal["loaded", "unloaded", "draining"] = Field(
        description="`draining`: requests still use the adapter; it is unloaded when they end."
    )
    rank: int | None = optional("Largest rank of the loaded adapter's matrices, else null.")
    targets: list[str] | None = optional("Kinds of layers that the loaded adapter changes, else null.")


@adapters_router.endpoint(
    "POST",
    "/v1/load_lora_adapter",
    body=LoadAdapterRequest,
    response=AdapterAnswer,
    errors=_ERRORS,
    examples={"plain": ("A directory in the adapter folder", {"lora_name": "poet", "lora_path": "poet"})},
)
async def load_adapter(request: Request) -> Response:
    """Load an adapter. Requests then give its name as their model."""
    require_admin(request)
    state = state_of(request)
    body = await read_body(request, LoadAdapterRequest)
    state.admit()
    adapter = await run_while_connected(request, state.adapters.load(body.lora_name, body.lora_path))
    answer = AdapterAnswer(id=body.lora_name, status="loaded")
    if adapter.info is not None:
        answer.rank, answer.targets = adapter.info.rank, list(adapter.info.targets)
    return Response(to_json(answer), media_type="application/json")


@adapters_router.endpoint(
    "POST",
    "/v1/unload_lora_adapter",
    body=UnloadAdapterRequest,
    response=AdapterAnswer,
    errors=_ERRORS,
    examples={"plain": ("A loaded adapter", {"lora_name": "poet"})},
)
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter: refuse new requests for it, and answer when its last request has ended, or after a time limit."""
    require_admin(request)
    state = state_of(request)
    body = await read_body(request, UnloadAdapterRequest)
    unloaded = await run_while_connected(request, state.adapters.unload(body.lora_name))
    answer = AdapterAnswer(id=body.lora_name, status="unloaded" if unloaded else "draining")
    return Response(to_json(answer), media_type="application/json")
