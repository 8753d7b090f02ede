"""Memory estimate of a model: weights, bytes per token, and the number of tokens that fit.

Uses config.json, file headers and options under the same rules as a start (`windlass size`). Reads no weights and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from windlass.engine.cache.kv_cache_budget import (
    CachePlan,
    bytes_per_token,
    default_kv_budget,
    device_kv_budget,
    plan_cache,
)
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig, Quantization
from windlass.engine.model.loading.gguf_index import INDEX
from windlass.engine.model.loading.preflight import (
    ModelToLoad,
    check_memory,
    expect_device,
    prepare_draft,
    prepare_model,
    processor_multiplies_bfloat16,
)
from windlass.engine.model.weight_storage import total_weight_bytes

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")

CACHE_DTYPES = ("float32", "float16", "int8")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to store weights or cached keys and values.

    name: of the option's value. stored: what that comes to. num_bytes: of the weights, or of a token in the cache. tokens: that
    fit; 0 where nothing does. chosen: whether it is what the options ask for.
    """

    name: str
    stored: str
    num_bytes: int
    tokens: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model under the options it would be started with; names as in `engine.api.request.ModelInfo`.

    draft_bytes: of the draft model's weights, 0 where there is none; a token's bytes are those in both caches. free: bytes that
    were counted with, None where nobody knows. refusal: what a start says where it does not fit, and then there
    are no blocks.
    from_config: whether there were no weight files, so that types are the config's word.
    """

    architecture: str
    num_parameters: int
    num_layers: int
    dtype: str
    stored: str
    weight_bytes: int
    draft_bytes: int
    kv_cache_dtype: str
    kv_bytes_per_token: int
    block_size: int
    trained_len: int
    max_num_seqs: int
    is_bidirectional: bool
    free: int | None
    num_kv_blocks: tuple[int, ...]
    num_states: int
    state_bytes: int
    kv_cache_bytes: int
    max_model_len: int
    refusal: str | None
    from_config: bool
    weights: tuple[Alternative, ...]
    caches: tuple[Alternative, ...]
    notices: tuple[str, ...]


def size_model(config: EngineConfig, free: int | None) -> ModelSize:
    """Sizes under this configuration. free: bytes before the weights are there, None if nobody knows.

    Where the folder holds config.json alone, that is counted by. Raises LoadError for a model or options that no memory would
    make startable.
    """
    device = expect_device(config.compute.device) or "cuda"
    from_config = config.loading.format == "dummy" or not _has_weights(Path(config.model))
    if from_config:
        config = replace(config, loading=replace(config.loading, format="dummy"))
    wanted, draft = _prepared(config, device), _drafted(config, device)
    plan, refusal = CachePlan((), 0, 0, ()), None
    try:
        plan = _planned(config, wanted, device, free)
    except LoadError as error:
        refusal = str(error)
    spec = wanted.model.spec
    return ModelSize(
        architecture=spec.architecture,
        num_parameters=sum(prod(weight.shape) for weight in spec.weights()),
        num_layers=len(spec.layers),
        dtype=wanted.compute_dtype,
        stored=wanted.quantization or wanted.weight_dtype,
        weight_bytes=_weight_bytes(wanted),
        draft_bytes=_weight_bytes(draft),
        kv_cache_dtype=wanted.cache_dtype,
        kv_bytes_per_token=_bytes_per_token(wanted) + _bytes_per_token(draft),
        block_size=config.cache.block_size,
        trained_len=spec.trained_len,
        max_num_seqs=config.scheduling.max_num_seqs,
        is_bidirectional=spec.is_bidirectional,
        free=free,
        num_kv_blocks=plan.num_blocks,
        num_states=plan.num_states,
        state_bytes=spec.state_bytes + _state_bytes(draft),
        kv_cache_bytes=plan.num_bytes,
        max_model_len=plan.max_model_len,
        refusal=refusal,
        from_config=from_config,
        weights=_weight_choices(config, wanted, device, free),
        caches=_cache_choices(config, wanted, device, free),
        notices=plan.notices,
    )


def _has_weights(directory: Path) -> bool:
    return (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))


def _prepared(config: EngineConfig, device: str) -> ModelToLoad:
    """As a start prepares it, but for the memory."""
    unbounded = replace(config, cache=replace(config.cache, memory=None))
    cpu = device == "cpu"
    return prepare_model(
        unbounded, device, reads_narrow=cpu, multiplies_narrow=cpu and processor_multiplies_bfloat16(), free=None
    )


def _drafted(config: EngineConfig, device: str) -> ModelToLoad | None:
    cpu = device == "cpu"
    return prepare_draft(config, device, cpu, cpu and processor_multiplies_bfloat16(), None)


def _weight_bytes(model: ModelToLoad | None) -> int:
    """Bytes of all weights."""
    return 0 if model is None else total_weight_bytes(model.model.spec, model.plan, model.compute_dtype)


def _bytes_per_token(model: ModelToLoad | None) -> int:
    """Bytes of a token in the cache."""
    return 0 if model is None else sum(bytes_per_token(g, model.cache_dtype) for g in model.model.spec.kv_groups)


def _state_bytes(model: ModelToLoad | None) -> int:
    """Bytes of what a sequence carries."""
    return 0 if model is None else model.model.spec.state_bytes


def _planned(config: EngineConfig, model: ModelToLoad, device: str, free: int | None) -> CachePlan:
    """The blocks that a start would have. Raises LoadError for what does not fit, in a start's words."""
    spec, draft = model.model.spec, _drafted(config, device)
    here = None if free is None else max(0, free - _weight_bytes(draft))
    draft_token_bytes = _bytes_per_token(draft), _state_bytes(draft)
    check_memory(
        config, model.model, model.plan, model.cache_dtype, model.weight_dtype, device, here, *draft_token_bytes
    )
    left = None if here is None else max(0, here - _weight_bytes(model))
    budget = config.cache.memory or default_kv_budget(left, config.replicas)
    if config.cache.memory is None and device != "cpu" and free is not None and left is not None:
        budget = max(0, device_kv_budget(free, free - left, left, config.cache.device_share))
    return plan_cache(
        config,
        spec.kv_groups,
        spec.trained_len,
        model.cache_dtype,
        budget,
        draft_token_bytes=_bytes_per_token(draft),
        whole_prompts=spec.is_bidirectional,
        states=spec.state_group,
        draft_state_bytes=_state_bytes(draft),
    )


def _tokens(config: EngineConfig, model: ModelToLoad, device: str, free: int | None) -> int:
    """That fit, 0 where nothing does."""
    try:
        plan = _planned(config, model, device, free)
    except LoadError:
        return 0
    return max(plan.num_blocks) * config.cache.block_size  # layers with a window have fewer


def _weight_choices(config: EngineConfig, model: ModelToLoad, device: str, free: int | None) -> tuple[Alternative, ...]:
    """The ways to store the weights that this model has."""
    names = (config.compute.quantization,) if model.model.is_quantized else QUANTIZATIONS
    found = []
    for name in names:
        asked = replace(config, compute=replace(config.compute, quantization=name))
        other = _prepared(asked, device)
        stored, tokens = other.quantization or other.weight_dtype, _tokens(asked, other, device, free)
        found.append(Alternative(name, stored, _weight_bytes(other), tokens, name == config.compute.quantization))
    return tuple(found)


def _cache_choices(config: EngineConfig, model: ModelToLoad, device: str, free: int | None) -> tuple[Alternative, ...]:
    """The types that the cache can have."""
    found = []
    for name in CACHE_DTYPES if model.cache_dtype in CACHE_DTYPES else (model.cache_dtype, *CACHE_DTYPES):
        asked = replace(config, cache=replace(config.cache, dtype=name))
        try:
            other = _prepared(asked, device)
        except LoadError:  # on a GPU latent attention has no int8
            continue
        token = _bytes_per_token(other) + _bytes_per_token(_drafted(asked, device))
        found.append(Alternative(name, name, token, _tokens(asked, other, device, free), name == model.cache_dtype))
    return tuple(found)
