"""Memory estimate of a model: weights, bytes per token, and the number of tokens that fit.

Uses config.json, file headers and options under the same rules as a start (`windlass size`). Reads no weights and imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from windlass.engine.cache.kv_cache_budget import CachePlan, default_kv_budget, device_kv_budget
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig, Quantization
from windlass.engine.model.loading.gguf_index import INDEX
from windlass.engine.model.loading.preflight import (
    DeviceCapabilities,
    ModelToLoad,
    check_memory,
    expect_device,
    prepare_model,
    processor_multiplies_bfloat16,
)

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
CACHE_DTYPES = ("float32", "float16", "int8")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to store weights or cached keys and values.

    name: the option's value. stored: the resulting storage. num_bytes: of the weights, or of a token in the cache. tokens:
    number that fits, 0 if the model does not. chosen: whether the options select it.
    """

    name: str
    stored: str
    num_bytes: int
    tokens: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model under given options; names as in `engine.interface.model_info.ModelInfo`.

    draft_bytes: of the draft model's weights, 0 if there is none; a token's bytes include the draft's cache. free: available
    bytes, None if unknown. refusal: the error of a start if the model does not fit; then there are no blocks. from_config:
    there are no weight files, so types are those that the config names.
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
    """Sizes under this configuration. free: bytes before the weights are loaded, None if unknown.

    A directory with config.json alone is sized by it. Raises LoadError for a model or options that cannot start with any
    amount of memory.
    """
    kind = expect_device(config.compute.device) or "cuda"
    on_cpu = kind == "cpu"
    device = DeviceCapabilities(kind, on_cpu, on_cpu and processor_multiplies_bfloat16(), free)
    from_config = config.loading.format == "dummy" or not _has_weights(Path(config.model))
    if from_config:
        config = replace(config, loading=replace(config.loading, format="dummy"))
    model = _prepare(config, device)
    plan, refusal = CachePlan((), 0, 0, ()), None
    try:
        plan = _plan_cache(config, model, device)
    except LoadError as error:
        refusal = str(error)
    spec, draft = model.spec, model.draft
    return ModelSize(
        architecture=spec.architecture,
        num_parameters=spec.num_parameters(),
        num_layers=len(spec.layers),
        dtype=model.compute_dtype,
        stored=model.quantization or model.weight_dtype,
        weight_bytes=model.weight_bytes,
        draft_bytes=0 if draft is None else draft.weight_bytes,
        kv_cache_dtype=model.cache_dtype,
        kv_bytes_per_token=_token_bytes(model),
        block_size=config.cache.block_size,
        trained_len=spec.trained_len,
        max_num_seqs=config.scheduling.max_num_seqs,
        is_bidirectional=spec.is_bidirectional,
        free=free,
        num_kv_blocks=plan.num_blocks,
        num_states=plan.num_states,
        state_bytes=spec.state_bytes + (0 if draft is None else draft.spec.state_bytes),
        kv_cache_bytes=plan.num_bytes,
        max_model_len=plan.max_model_len,
        refusal=refusal,
        from_config=from_config,
        weights=_weight_choices(config, model, device),
        caches=_cache_choices(config, model, device),
        notices=plan.notices,
    )


def _has_weights(directory: Path) -> bool:
    return (directory / INDEX).is_file() or any(directory.glob("*.safetensors"))


def _prepare(config: EngineConfig, device: DeviceCapabilities) -> ModelToLoad:
    """The whole model as a start prepares it, without a limit of memory."""
    unbounded = replace(config, cache=replace(config.cache, memory=None))
    return prepare_model(unbounded, replace(device, free=None)).unsharded


def _token_bytes(model: ModelToLoad) -> int:
    """Bytes of a token in the caches of the model and of its draft."""
    return model.token_bytes + (0 if model.draft is None else model.draft.token_bytes)


def _plan_cache(config: EngineConfig, model: ModelToLoad, device: DeviceCapabilities) -> CachePlan:
    """The blocks that a start would have. Raises LoadError, with the text of a start, if the model does not fit."""
    free, available = device.free, model.free_after_draft(device)
    check_memory(config, model, device)
    left = None if available is None else max(0, available - model.weight_bytes)
    budget = config.cache.memory or default_kv_budget(left, config.replicas)
    if config.cache.memory is None and not device.is_cpu and free is not None and left is not None:
        budget = max(0, device_kv_budget(free, free - left, left, config.cache.device_share))
    return model.plan_cache(config, budget)


def _max_tokens(config: EngineConfig, model: ModelToLoad, device: DeviceCapabilities) -> int:
    """Number of tokens that fit, 0 if the model does not."""
    try:
        plan = _plan_cache(config, model, device)
    except LoadError:
        return 0
    return max(plan.num_blocks) * config.cache.block_size  # layers with a window have fewer blocks


def _weight_choices(config: EngineConfig, model: ModelToLoad, device: DeviceCapabilities) -> tuple[Alternative, ...]:
    """The storages of weights that this model supports."""
    names = (config.compute.quantization,) if model.model.is_quantized else QUANTIZATIONS
    found = []
    for name in names:
        changed = replace(config, compute=replace(config.compute, quantization=name))
        other = _prepare(changed, device)
        stored, tokens = other.quantization or other.weight_dtype, _max_tokens(changed, other, device)
        found.append(Alternative(name, stored, other.weight_bytes, tokens, name == config.compute.quantization))
    return tuple(found)


def _cache_choices(config: EngineConfig, model: ModelToLoad, device: DeviceCapabilities) -> tuple[Alternative, ...]:
    """The types of cached keys and values that this model supports."""
    found = []
    for name in CACHE_DTYPES if model.cache_dtype in CACHE_DTYPES else (model.cache_dtype, *CACHE_DTYPES):
        changed = replace(config, cache=replace(config.cache, dtype=name))
        try:
            other = _prepare(changed, device)
        except LoadError:  # on a GPU, latent attention does not support int8
            continue
        tokens = _max_tokens(changed, other, device)
        found.append(Alternative(name, name, _token_bytes(other), tokens, name == model.cache_dtype))
    return tuple(found)
