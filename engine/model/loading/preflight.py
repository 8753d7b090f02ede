"""Preflight checks: dtypes, storage, memory and option errors, before a weight is read.

The server runs them before it listens and the loader runs them again, so there is one set of rules. Imports no torch: what only
torch can determine (a GPU's free memory, the available kernels) is passed in by the caller.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

from windlass.engine.cache.disk_tier import check_tier_options, check_tier_support
from windlass.engine.cache.kv_cache_budget import bytes_per_token, default_kv_budget, gib, plan_cache
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory, processor_quota, processors
from windlass.engine.interface.config import EngineConfig, parse_cache_dtype, parse_dtype
from windlass.engine.model.config_json.config_rules import Config
from windlass.engine.model.loading.checkpoint import matrix_types
from windlass.engine.model.loading.draft_model import (
    MTPPart,
    check_draft_compatible,
    draft_config,
    has_usable_mtp_head,
    mtp,
    reword_for_draft,
)
from windlass.engine.model.loading.gguf_index import GGUFIndex, block_columns, gguf_storages, requantization_notice
from windlass.engine.model.loading.model_description import ModelDescription, describe_model
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.tensor_parallel import ModelShard, shard_model
from windlass.engine.model.weight_storage import StoragePlan, block_formats, plan_bytes, plan_storage

_CUDA_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so", "torch_cuda.dll")


def expect_device(name: str) -> str | None:
    """ "cpu", "cuda", or None where only torch can tell. Raises LoadError for a device that this torch cannot have."""
    if name == "cpu":
        return "cpu"
    if name == "auto":
        return None if _torch_has_cuda() else "cpu"
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise LoadError(f"`compute.device={name}` is not known: use auto, cpu, cuda, or cuda:1 for the second GPU")
    if not _torch_has_cuda():
        raise LoadError(
            f"`compute.device={name}`: the installed torch has no CUDA: use `compute.device=cpu`, or install a CUDA build"
        )
    return "cuda"


def check_rank_device(name: str, ranks: int) -> None:
    """LoadError for one named GPU, where each of several ranks has one."""
    if ranks > 1 and ":" in name:
        raise LoadError(
            f"`compute.device={name}` is one GPU, and `compute.tensor_parallel={ranks}` takes one for each rank: use "
            "`compute.device=cuda`, and name those it may see in CUDA_VISIBLE_DEVICES"
        )


def _torch_has_cuda() -> bool:
    """Whether the installed torch brings its CUDA (or ROCm) library; there may still be no GPU."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    return any(Path(folder, "lib", name).is_file() for folder in folders or () for name in _CUDA_LIBRARIES)


_LEAST_ROUNDED = 64 << 20  # bytes of weights; what is smaller is quick enough in float32

BFLOAT16_NOTICE = (
    "computed in bfloat16, which this processor multiplies natively: `compute.dtype=float32` rounds nothing and takes twice as "
    "long for prompts"
)


def compute_dtype(config: EngineConfig, hf_config: Config, device: str, in_files: str | None = None) -> str:
    """What the model computes in. auto: on CUDA the checkpoint's own; on a CPU float32, but see `prefers_bfloat16`.

    in_files: the one type that the matrices have in the files, which counts where the config names none.
    """
    name = parse_dtype(config.compute.dtype)
    if name != "auto":
        return name
    if device == "cpu":
        return "float32"
    return parse_dtype(str(hf_config.get("dtype") or hf_config.get("torch_dtype") or in_files or "bfloat16"))


def cache_dtype(config: EngineConfig, dtype: str, *, rounded: bool) -> str:
    """What keys and values are cached in, where the model computes in `dtype`.

    rounded: whether compiled kernels multiply rows of 8 bits by weights in blocks. What such products change of predictions
    is ten thousand times what float16 does, and half the bytes are read (docs/benchmarks.md); so float16 is what `auto` means.
    """
    name = parse_cache_dtype(config.cache.dtype)
    if name != "auto":
        return name
    return "float16" if rounded and dtype == "float32" else dtype


def prefers_bfloat16(config: EngineConfig, spec: ModelSpec, plan: StoragePlan, stored: str) -> bool:
    """Whether `auto` means bfloat16 on a CPU whose kernels multiply that natively: prompts are read twice as quickly for 0.0005
    nats (docs/benchmarks.md). Only for matrices that are bfloat16 already and lie in no blocks, not for experts and ranks, where
    it was not measured, and not where tokens must not depend on how a text was cut.
    """
    return (
        parse_dtype(config.compute.dtype) == "auto"
        and stored == "bfloat16"
        and not config.compute.deterministic
        and config.compute.tensor_parallel == 1
        and not block_formats(spec, plan)
        and not spec.has_experts
        and plan_bytes(spec, plan) >= _LEAST_ROUNDED
    )


def processor_multiplies_bfloat16() -> bool:
    """What `kernels.has_native_bf16` says of a CPU, as far as that can be told without torch: by Linux's list
    of what the processor has, unless the kernels were told to use less of it."""
    if os.environ.get("WINDLASS_CPU_ISA", "avx512_bf16") not in ("avx512_bf16", "avx512_amx"):
        return False
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return "avx512_bf16" in flags


def check_quantization(config: EngineConfig) -> None:
    """LoadError for a way to quantize weights that there is not."""
    if config.compute.quantization == "none":
        return
    option = f"`compute.quantization={config.compute.quantization}`"
    if config.compute.quantization not in ("int8", "int4"):
        raise LoadError(f"{option} is not known: use none, int8 or int4")


def check_replicas(config: EngineConfig, device: str) -> None:
    """LoadError where several engines cannot stand side by side. device: "cpu", "cuda:1", …"""
    if device != "cpu" and (config.replicas > 1 or config.loading.shared_memory):
        raise LoadError(
            f"`replicas` share the cores and the memory of a CPU, not {device}: use `compute.device=cpu`, or leave it out"
        )


def check_device_share(config: EngineConfig, device: str) -> None:
    """LoadError for a share of a GPU where there is none. device: "cpu", "cuda:1", …"""
    if device == "cpu" and config.cache.device_share is not None:
        raise LoadError("`cache.device_share` is for GPUs: use `cache.memory` on a CPU")


class WeighedModel(Protocol):
    """A model as its files describe it: see `preflight.ModelDescription`."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def is_quantized(self) -> bool: ...


def check_memory(
    config: EngineConfig,
    model: WeighedModel,
    plan: StoragePlan,
    cached: str,
    stored: str,
    device: str,
    free: int | None,
    draft_token_bytes: int = 0,
    draft_state_bytes: int = 0,
) -> None:
    """LoadError where weights, or cached keys and values beside them, plainly do not fit into the memory that is free.

    cached, stored: what keys and values are cached in, and matrices stored in before they are quantized. free: bytes before
    the weights are there, None if nobody knows. beside, draft_state_bytes: bytes of a draft model's per token, and of its states.
    """
    spec = model.spec
    weights = plan_bytes(spec, plan)
    on = "" if device == "cpu" else f" on {device}"
    if free is not None and weights > free:
        smaller = _smaller_options(model, weights, stored, free)
        raise LoadError(f"the weights need {gib(weights)} of memory, {gib(free)} are free{on}: {smaller}")
    left = None if free is None else free - weights
    if config.cache.memory is None and left is None:
        return
    # What a GPU has in all and a step takes of it is known once the weights are there: the engine counts again.
    share = default_kv_budget(left, config.replicas) if left is None or device == "cpu" else left
    budget = config.cache.memory or share
    engines = config.replicas
    most = None if left is None else left // engines
    cache = plan_cache(
        config,
        spec.kv_groups,
        spec.trained_len,
        cached,
        budget,
        most,
        draft_token_bytes,
        whole_prompts=spec.is_bidirectional,
        states=spec.state_group,
        draft_state_bytes=draft_state_bytes,
    )
    if left is not None and cache.num_bytes * engines > left:
        there = f"{gib(free or 0)} are free{on}, {gib(weights)} of it for the weights"
        raise LoadError(kv_cache_too_large(there, cache.num_bytes * engines, cached, engines))


def kv_cache_too_large(there: str, num_bytes: int, cached: str, engines: int = 1) -> str:
    """What to say of the KV caches of so many engines that there is no memory for. there: the memory there is, in words."""
    less = "" if cached == "int8" else ", or use `cache.dtype=int8`"
    lower = f"`cache.memory`, `max_model_len` or `scheduling.max_num_seqs`{less}"
    if engines == 1:
        return f"the KV cache needs {gib(num_bytes)} of memory, {there}: lower {lower}"
    return f"the KV caches of {engines} replicas need {gib(num_bytes)} of memory, {there}: lower `replicas`, {lower}"


def _smaller_options(model: WeighedModel, weights: int, stored: str, free: int) -> str:
    """Options under which the weights fit, each with what they then need."""
    choices: list[tuple[str, int]] = []
    quantized = model.is_quantized
    if stored == "float32" and not quantized:
        choices.append(("`compute.dtype=bfloat16`", plan_bytes(model.spec, plan_storage(model.spec, "bfloat16"))))
    if not quantized:
        choices += [
            (f"`compute.quantization={q}`", plan_bytes(model.spec, plan_storage(model.spec, stored, q)))
            for q in ("int8", "int4")
        ]
    fitting = [f"{option} ({gib(size)})" for option, size in choices if size < min(weights, free)]
    return f"use {', '.join(fitting)} or a smaller model" if fitting else "use a smaller model or free some memory"


_TABLE_BYTES = 2  # of an element of an embedding, which every rank has whole, about


def prepare_shard(
    config: EngineConfig,
    spec: ModelSpec,
    plan: StoragePlan,
    device: str,
    gguf: GGUFIndex | None,
    quantized: str | None,
    free: int | None,
    rank: int,
) -> tuple[ModelShard | None, tuple[str, ...]]:
    """A rank's part, and what a person should know of it; None where there is one rank. Raises LoadError.

    plan: of the whole model. device: "cpu" or "cuda". quantized: what to call a checkpoint that is quantized already. free:
    bytes of memory, None if nobody knows.
    """
    ranks = config.compute.tensor_parallel
    if ranks == 1:
        return None, ()
    _check_tensor_parallel(config, quantized)
    part = shard_model(spec, plan, rank, ranks, None if gguf is None else block_columns(gguf.tensors))
    found = _uneven_heads_notice(part)
    if device == "cpu":  # else each has a device of its own
        found += _shared_resource_notices(config, part, plan_bytes(spec, plan), free)
    return part, tuple(found)


def _check_tensor_parallel(config: EngineConfig, quantized: str | None) -> None:
    """LoadError for what an engine of several ranks does not do."""
    option = f"`compute.tensor_parallel={config.compute.tensor_parallel}`"
    if quantized is not None:
        raise LoadError(
            f"{option}: a {quantized} checkpoint is not split: give the unquantized model with `compute.quantization=int8`, or "
            "a GGUF file"
        )
    if config.loading.format == "dummy":
        raise LoadError(f"{option} splits weights that are in files: leave `loading.format=dummy` out")
    if config.adapters.sources:
        raise LoadError(f"{option}: adapters are not split: leave `adapters.sources` out, or merge them into the model")
    for field, where in (("persist", config.cache.persist), ("host_memory", config.cache.host_memory)):
        if where is not None:
            raise LoadError(
                f"{option}: each rank caches heads of its own, which are kept nowhere else: leave `cache.{field}` out"
            )


def _uneven_heads_notice(part: ModelShard) -> list[str]:
    heads = {layer.mixer.num_kv_heads for layer in part.whole.layers if isinstance(layer.mixer, AttentionSpec)}
    return [
        f"{count} heads of keys are not shared out evenly over {part.ranks} ranks: those with fewer wait for those with more"
        for count in sorted(count for count in heads if count % part.ranks)[:1]
    ]


def _shared_resource_notices(config: EngineConfig, part: ModelShard, whole_bytes: int, free: int | None) -> list[str]:
    """What ranks have in common and may have too little of."""
    ranks, engines, found = part.ranks, config.replicas, list[str]()
    own = config.compute.cores
    processes, cores = (ranks * engines, processors()) if own is None else (ranks, len(own))
    if own is not None and (quota := processor_quota()) is not None:  # all engines have that in common
        cores = max(1, min(cores, int(quota) // engines))
    if processes > cores:
        shared = "one core" if cores == 1 else f"{cores} cores"
        found.append(f"{processes} ranks share {shared}, and wait for each other: use fewer")
    tables = [prod(one.shape) for one in part.whole.weights() if one.kind in ("table", "wide table", "table and head")]
    needed = engines * (whole_bytes + (ranks - 1) * sum(tables) * _TABLE_BYTES)
    if free is not None and needed > free:
        found.append(f"the weights of all ranks need {gib(needed)} of memory, {gib(free)} are free")
    return found


_OFFER = "the files hold a layer that predicts further tokens: `scheduling.speculation.mtp` lets it propose them"


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
    dtype = compute_dtype(config, model.config, kind, _type_in_files(model))
    stored = weight_dtype(config, model, dtype, kind, reads_narrow=reads_narrow)
    plan = storage_plan(config, model, stored, reads_narrow=reads_narrow)
    said: tuple[str, ...] = ()
    if multiplies_narrow and prefers_bfloat16(config, model.spec, plan, stored):
        dtype, said = "bfloat16", (BFLOAT16_NOTICE,)
    in_blocks = reads_narrow and kind == "cpu" and bool(block_formats(model.spec, plan))
    rounded = in_blocks and config.compute.activations == "int8"
    cached = cache_dtype(config, dtype, rounded=rounded)
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
