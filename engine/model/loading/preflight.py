"""What stands against a start, told from config.json, file names, file headers and options before a weight is read.

The server asks here before it listens and the engine's loader asks again, so there is one set of rules. It imports no torch:
what only torch can tell (a GPU's memory, which kernels there are) its caller says, or it is left to the loader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.engine.api.config import EngineConfig, parse_dtype
from windlass.engine.api.machine import available_memory
from windlass.engine.cache.budget import bytes_per_token
from windlass.engine.cache.persist.folder import check_tier_options, check_tier_support
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.model.config_json.unsupported import describe_quantized, describe_tensors
from windlass.engine.model.config_json.values import Config
from windlass.engine.model.families.reading import read_spec
from windlass.engine.model.families.text_part import text_config_of
from windlass.engine.model.loading import dtypes
from windlass.engine.model.loading.checkpoint import matrix_types, read_headers
from windlass.engine.model.loading.device import check_rank_device, expect_device
from windlass.engine.model.loading.draft_model import check_draft_compatible, draft_config, reword_for_draft
from windlass.engine.model.loading.fitting import check_memory
from windlass.engine.model.loading.gguf_index import GGUFIndex, gguf_storages, read_index, requantization_notice
from windlass.engine.model.loading.inventory import check_tensors
from windlass.engine.model.loading.learned_frequencies import with_learned_frequencies
from windlass.engine.model.loading.part import prepare_shard
from windlass.engine.model.loading.prediction_layer import MTPPart, has_usable_mtp_head, mtp, prediction_layer
from windlass.engine.model.loading.quantized.describing import describe_quantized_weights
from windlass.engine.model.loading.quantized.plan import QuantizedCheckpoint
from windlass.engine.model.loading.refusals import (
    check_device_share,
    check_not_quantized_twice,
    check_quantization,
    check_replicas,
)
from windlass.engine.model.loading.safetensors_header import TensorHeader
from windlass.engine.model.loading.stored_names import with_expert_layout, with_stored_names
from windlass.engine.model.parallel.split import ModelShard
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.storage import StoragePlan, block_formats, plan_bytes, plan_storage
from windlass.engine.rotary.groups import RotaryGroup, apply_scaling
from windlass.engine.rotary.ladder import AUTO, checked_thresholds

_OFFER = "the files hold a layer that predicts further tokens: `scheduling.speculation.mtp` lets it propose them"
_SCALING, LADDER = "`rotary.scaling`", "`rotary.ladder`"  # fields at fault


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as its files describe it.

    spec: under the server's scaling; unscaled_groups: the rotary groups before it. headers: of every tensor in the files, none
    under `loading.format=dummy`. gguf: the index of the files where they are GGUF. quantized: what their weights are made of
    where they are quantized in the ways of Hugging Face. original_spec: with rows in the order of the original weights.
    """

    config: Config
    spec: ModelSpec
    unscaled_groups: tuple[RotaryGroup, ...]
    headers: dict[str, TensorHeader]
    gguf: GGUFIndex | None = None
    quantized: QuantizedCheckpoint | None = None
    original_spec: ModelSpec | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized already."""
        return (self.gguf is not None and self.gguf.is_quantized()) or (
            self.quantized is not None and self.quantized.is_integers
        )


@dataclass(frozen=True, slots=True)
class ModelToLoad:
    """A model, and how it is loaded.

    compute_dtype, weight_dtype, cache_dtype: names of the types it computes in, its matrices have that are not in blocks, and
    keys and values are cached in. bf16_prefill: whether attention of prompts may round what it multiplies, as products do
    already. plan: of all its weights. quantization: what to call that, None where nothing is quantized. part: of the rank that
    loads it, None where it is loaded whole.
    """

    model: ModelDescription
    compute_dtype: str
    weight_dtype: str
    cache_dtype: str
    bf16_prefill: bool
    plan: StoragePlan
    quantization: str | None
    notices: tuple[str, ...]
    part: ModelShard | None = None


def check_start(config: EngineConfig) -> ModelDescription:
    """The model that is to be started. Raises LoadError, one line that says what to do, for a start that cannot succeed, as
    far as that can be told without torch."""
    device = expect_device(config.compute.device)
    check_tier_options(config)
    if device is None:
        model, draft = describe_model(config), draft_config(config)
        if draft is not None:
            check_draft_compatible(config, model.spec, _describe_draft(config, draft).spec)
        return model
    on_cpu = device == "cpu"
    if not on_cpu:
        check_replicas(config, device)
        check_rank_device(config.compute.device, config.compute.tensor_parallel)
    # Without compiled kernels weights are wider on a CPU; what a GPU has free only torch tells. The loader counts again.
    prepared = prepare_model(
        config,
        device,
        reads_narrow=on_cpu,
        multiplies_narrow=on_cpu,
        free=available_memory() if on_cpu else None,
    )
    spec = prepared.model.spec
    token_bytes = sum(bytes_per_token(group, prepared.cache_dtype) for group in spec.kv_groups)
    check_tier_support(config, token_bytes, is_bidirectional=spec.is_bidirectional, on_device=not on_cpu)
    return prepared.model


def prepare_model(
    config: EngineConfig,
    device: str,
    *,
    reads_narrow: bool,
    multiplies_narrow: bool = False,
    free: int | None,
    rank: int = 0,
    what: MTPPart | None = None,
) -> ModelToLoad:
    """The model and the types it is loaded in. Raises LoadError for what cannot be loaded or plainly does not fit.

    device: "cpu", "cuda:1", … reads_narrow: whether the kernels multiply by weights of 16 bits; multiplies_narrow: and do
    so natively in bfloat16. free: bytes before the weights are there, None if nobody knows. rank: of those of
    `compute.tensor_parallel`. what: of the model, where it is not the model.
    """
    check_quantization(config)
    check_device_share(config, device)
    model = describe_model(config, what=what)
    draft = prepare_draft(config, device, reads_narrow, multiplies_narrow, free)
    kind = device.partition(":")[0]
    draft_token_bytes = draft_state_bytes = 0
    if draft is not None:
        check_draft_compatible(config, model.spec, draft.model.spec)
        free = None if free is None else max(0, free - plan_bytes(draft.model.spec, draft.plan))
        draft_token_bytes = sum(bytes_per_token(group, draft.cache_dtype) for group in draft.model.spec.kv_groups)
        draft_state_bytes = draft.model.spec.state_bytes
    dtype = dtypes.compute_dtype(config, model.config, kind, _type_in_files(model))
    stored = weight_dtype(config, model, dtype, kind, reads_narrow=reads_narrow)
    plan = storage_plan(config, model, stored, reads_narrow=reads_narrow)
    said: tuple[str, ...] = ()
    if multiplies_narrow and dtypes.prefers_bfloat16(config, model.spec, plan, stored):
        dtype, said = "bfloat16", (dtypes.BFLOAT16_NOTICE,)
    in_blocks = reads_narrow and kind == "cpu" and bool(block_formats(model.spec, plan))
    rounded = in_blocks and config.compute.activations == "int8"
    cached = dtypes.cache_dtype(config, dtype, rounded=rounded)
    check_cache_dtype(model.spec, cached, kind)
    title = None if model.quantized is None else model.quantized.title
    part, of_ranks = prepare_shard(config, model.spec, plan, kind, model.gguf, title, free, rank)
    if part is None or kind == "cpu":  # whose memory all ranks have in common
        check_memory(config, model, plan, cached, stored, kind, free, draft_token_bytes, draft_state_bytes)
    else:
        check_memory(
            _of_part(config, part, cached), replace(model, spec=part.spec), part.plan, cached, stored, kind, free
        )
    called = describe_storage(config, model, plan)
    bf16_prefill = rounded or dtype == "bfloat16"
    offer: tuple[str, ...] = ()
    if what is None and not config.scheduling.speculation.max_proposed_tokens and config.compute.tensor_parallel == 1:
        offer = (_OFFER,) if has_usable_mtp_head(model.spec, model.headers) else ()
    notices = said + notices_of(model, plan, stored) + of_ranks + offer
    return ModelToLoad(model, dtype, stored, cached, bf16_prefill, plan, called, notices, part)


def _of_part(config: EngineConfig, part: ModelShard, cached: str) -> EngineConfig:
    """With this rank's share of the bytes that the operator gives the caches of all."""
    if config.cache.memory is None:
        return config
    own, whole = (sum(bytes_per_token(group, cached) for group in one.kv_groups) for one in (part.spec, part.whole))
    return replace(config, cache=replace(config.cache, memory=max(1, config.cache.memory * own // whole)))


def prepare_draft(
    config: EngineConfig, device: str, reads_narrow: bool, multiplies_narrow: bool, free: int | None
) -> ModelToLoad | None:
    """As `prepare_model`, of what drafts; None where nothing does."""
    draft, speculation = draft_config(config), config.scheduling.speculation
    if draft is None:
        return None
    try:
        return prepare_model(
            draft,
            device,
            reads_narrow=reads_narrow,
            multiplies_narrow=multiplies_narrow,
            free=free,
            what=mtp(speculation),
        )
    except LoadError as error:
        raise reword_for_draft(error, speculation) from None


def _describe_draft(config: EngineConfig, draft: EngineConfig) -> ModelDescription:
    speculation = config.scheduling.speculation
    try:
        return describe_model(draft, what=mtp(speculation))
    except LoadError as error:
        raise reword_for_draft(error, speculation) from None


def describe_model(config: EngineConfig, *, what: MTPPart | None = None) -> ModelDescription:
    """Read config.json and the headers of the weights. Raises LoadError for a model that is not understood.

    what: of the model, where it is not the model.
    """
    directory = Path(config.model)
    part = text_config_of(read_json(directory / "config.json"))
    hf_config = part.config
    generation_path = directory / "generation_config.json"
    spec = read_spec(hf_config, read_json(generation_path) if generation_path.is_file() else None)
    dummy = config.loading.format == "dummy"
    headers = {} if dummy else read_headers(directory)
    spec = part.adapt_spec(spec, headers)
    gguf = None if dummy else read_index(directory)
    original_spec = spec
    if spec.positions and (config.max_model_len or 0) > spec.positions:
        raise LoadError(
            f"`max_model_len` is {config.max_model_len}, and the positions of this model are a table of {spec.positions}, beyond "
            "which there are none: lower it"
        )
    if gguf is not None:
        original_spec, spec = gguf.original(spec), gguf.adapt(spec)
    fault = describe_quantized(hf_config, headers)
    if fault is None and not part.is_multimodal:
        fault = describe_tensors(headers)
    if fault is not None:
        raise LoadError(f"{directory}: {fault}")
    try:
        spec = with_stored_names(spec, headers)
        if what is not None:
            spec = prediction_layer(spec, headers, what, in_gguf=gguf is not None)
        spec = with_expert_layout(spec, headers)
    except LoadError as error:
        raise LoadError(f"{directory}: {error}") from None
    gguf = None if gguf is None else gguf.of(spec)
    quantized = None if dummy or gguf is not None else describe_quantized_weights(hf_config, spec, directory)
    check_not_quantized_twice(config, directory, gguf, quantized)
    unscaled_groups = with_learned_frequencies(spec.rotary_groups, directory)
    scaling = config.rotary.scaling
    if config.rotary.ladder:
        checked_thresholds(unscaled_groups, config.rotary.ladder, LADDER)
    try:
        groups = apply_scaling(unscaled_groups, None if scaling == AUTO else scaling, param=_SCALING)
    except RequestError as error:
        raise LoadError(error.message) from None
    adapt_spec = replace(spec, rotary_groups=groups)
    if not dummy:
        check_tensors(directory, adapt_spec, headers, gguf, quantized)
    return ModelDescription(hf_config, adapt_spec, unscaled_groups, headers, gguf, quantized, original_spec)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or LoadError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(
            f"{path} does not exist: give a Hugging Face model directory (config.json, *.safetensors, …)"
        ) from None
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} does not hold a JSON object: download it again")
    return value


def weight_dtype(config: EngineConfig, model: ModelDescription, dtype: str, device: str, *, reads_narrow: bool) -> str:
    """How matrices are stored: under `auto` on a CPU as the checkpoint has them, where the kernels read that.

    What counts is the files, not the config's word for them: a float32 file under a bfloat16 config keeps its digits.
    reads_narrow: whether the kernels multiply by weights of 16 bits.
    """
    if parse_dtype(config.compute.dtype) != "auto" or device != "cpu" or not reads_narrow:
        return dtype
    if config.loading.format == "dummy":
        stored = str(model.config.get("dtype") or model.config.get("torch_dtype") or "float32")
        return stored if stored in ("bfloat16", "float16") else dtype
    found = _type_in_files(model)
    return found if found in ("bfloat16", "float16") else dtype


def _type_in_files(model: ModelDescription) -> str | None:
    """That of all plain matrices in the files, None where there are several, or another than the engine computes in."""
    others = set(model.quantized.sources if model.quantized is not None else ())
    # What is float32 here in any case: routers often are in their files too.
    others |= {one.name for weight in model.spec.weights() if weight.kind == "score" for one in weight.stored}
    found = matrix_types({name: header for name, header in model.headers.items() if name not in others})
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    return names.get(next(iter(found))) if len(found) == 1 else None


def check_cache_dtype(spec: ModelSpec, cached: str, kind: str) -> None:
    """LoadError where keys and values cannot be cached in this type. kind: of device."""
    if cached == "float8_e4m3fn" and kind == "cpu":
        raise LoadError(
            "`cache.dtype=fp8` is for GPUs: the kernels for CPUs have no such pages. Use `cache.dtype=int8`, which takes as many "
            "bytes and is nearer"
        )
    if cached == "int8" and kind != "cpu" and not all(group.cached_value_dim for group in spec.kv_groups):
        raise LoadError(
            "`cache.dtype=int8` with latent attention is for the CPU: there is no kernel for its rows on a GPU: use "
            "`cache.dtype=bfloat16` or leave it out"
        )


def storage_plan(config: EngineConfig, model: ModelDescription, stored: str, *, reads_narrow: bool) -> StoragePlan:
    """How every weight is stored. stored: the type of those that are not in blocks; reads_narrow: as in `weight_dtype`.

    Matrices of heads that the files have in blocks are numbers here. Where rows are rounded to 8 bits anyway, they are read in
    float16, which rounds them by a sixteenth at most of what 8 bits did; deterministic steps have them whole.
    """
    quantization, storages = config.compute.quantization, {}
    own = parse_dtype(config.compute.dtype) == "auto" and reads_narrow
    if model.gguf is not None and quantization == "none":
        storages = gguf_storages(model.gguf.tensors, plain=own)
    if model.quantized is not None and quantization == "none":
        storages = model.quantized.storages()
    rounds = own and stored == "float32" and config.compute.activations == "int8" and not config.compute.deterministic
    return plan_storage(model.spec, stored, quantization, storages, "float16" if rounds else None)


def describe_storage(config: EngineConfig, model: ModelDescription, plan: StoragePlan) -> str | None:
    """What to call the quantization of the weights: "int8 (q8_0)", "GGUF Q4_1, Q8_0"; None where there is none."""
    if config.compute.quantization != "none":
        return f"{config.compute.quantization} ({', '.join(block_formats(model.spec, plan))})"
    if model.gguf is not None:
        return f"GGUF {', '.join(model.gguf.types())}"
    forms = block_formats(model.spec, plan)
    return f"{model.quantized.title} ({', '.join(forms)})" if model.quantized is not None and forms else None


def notices_of(model: ModelDescription, plan: StoragePlan, stored: str) -> tuple[str, ...]:
    """What a person should know of how the weights are stored."""
    if model.quantized is not None:
        blocks = bool(block_formats(model.spec, plan))
        return () if blocks and not model.is_quantized else model.quantized.notices(stored)
    if model.gguf is None or not model.gguf.is_quantized():
        return ()
    notice = requantization_notice(model.gguf.tensors)
    return () if notice is None else (notice,)
