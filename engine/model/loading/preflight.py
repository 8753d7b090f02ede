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

from windlass.engine.cache.kv_cache_budget import (
    CachePlan,
    bytes_per_token,
    check_tier_options,
    check_tier_support,
    default_kv_budget,
    gib,
    plan_cache,
)
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory, processor_quota, processors
from windlass.engine.interface.config import EngineConfig, parse_cache_dtype, parse_dtype
from windlass.engine.model.loading.draft_model import (
    MTPPart,
    check_draft_compatible,
    for_draft,
    has_usable_mtp_head,
)
from windlass.engine.model.loading.gguf_index import GGUF_TYPES
from windlass.engine.model.loading.model_description import ModelDescription, describe_model
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.model_spec import ModelSpec
from windlass.engine.model.tensor_parallel import ModelShard, shard_model
from windlass.engine.model.weight_storage import (
    StoragePlan,
    block_formats,
    plan_bytes,
    plan_storage,
    total_weight_bytes,
)

# -- Device ------------------------------------------------------------------------------------------------------------

_CUDA_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so", "torch_cuda.dll")


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """A device, as far as it determines how a model is stored.

    name: "cpu", "cuda:1", … reads_16_bit: whether the kernels multiply by weights of 16 bits. native_bfloat16: and do so natively
    in bfloat16. free: bytes before the weights are loaded, None if unknown.
    """

    name: str
    reads_16_bit: bool
    native_bfloat16: bool = False
    free: int | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


def expect_device(name: str) -> str | None:
    """ "cpu", "cuda", or None if only torch can determine it. Raises LoadError for a device that this torch cannot have."""
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


def _torch_has_cuda() -> bool:
    """Whether the installed torch includes its CUDA (or ROCm) library; there may still be no GPU."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    return any(Path(folder, "lib", name).is_file() for folder in folders or () for name in _CUDA_LIBRARIES)


def check_rank_device(name: str, ranks: int) -> None:
    """Raise LoadError for one named GPU if several ranks need one each."""
    if ranks > 1 and ":" in name:
        raise LoadError(
            f"`compute.device={name}` is one GPU, and `compute.tensor_parallel={ranks}` takes one for each rank: use "
            "`compute.device=cuda`, and name those it may see in CUDA_VISIBLE_DEVICES"
        )


def check_replicas(config: EngineConfig, device: str) -> None:
    """Raise LoadError for replicas on a device that cannot have several engines. device: "cpu", "cuda:1", …"""
    if device != "cpu" and (config.replicas > 1 or config.loading.shared_memory):
        raise LoadError(
            f"`replicas` need a CPU, whose cores and memory they share, not {device}: use `compute.device=cpu`, or leave it out"
        )


def check_device_share(config: EngineConfig, device: DeviceCapabilities) -> None:
    """Raise LoadError for a share of a GPU's memory on a CPU."""
    if device.is_cpu and config.cache.device_share is not None:
        raise LoadError("`cache.device_share` is for GPUs: use `cache.memory` on a CPU")


def processor_multiplies_bfloat16() -> bool:
    """What `kernels.has_native_bf16` returns for a CPU, as far as Linux's list of processor flags shows without torch.

    False if WINDLASS_CPU_ISA limits the kernels to an older instruction set."""
    if os.environ.get("WINDLASS_CPU_ISA", "avx512_bf16") not in ("avx512_bf16", "avx512_amx"):
        return False
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return "avx512_bf16" in flags


# -- Dtypes and storage ------------------------------------------------------------------------------------------------

_LEAST_ROUNDED = 64 << 20  # bytes of weights; smaller models are fast enough in float32

BFLOAT16_NOTICE = (
    "computed in bfloat16, which this processor multiplies natively: `compute.dtype=float32` avoids its rounding, and takes "
    "twice as long for prompts"
)


def compute_dtype(config: EngineConfig, model: ModelDescription, device: DeviceCapabilities) -> str:
    """The compute dtype. auto: the config's or that of all matrices in the files on CUDA; float32 on a CPU, but see
    `prefers_bfloat16`."""
    name = parse_dtype(config.compute.dtype)
    if name != "auto":
        return name
    return "float32" if device.is_cpu else parse_dtype(_named_dtype(model) or _stored_dtype(model) or "bfloat16")


def _named_dtype(model: ModelDescription) -> str | None:
    name = model.config.get("dtype") or model.config.get("torch_dtype")
    return str(name) if name else None


def cache_dtype(config: EngineConfig, dtype: str, *, rounded: bool) -> str:
    """The type of cached keys and values, for a model that computes in `dtype`.

    rounded: whether compiled kernels multiply activations rounded to 8 bits by weights in blocks. That changes predictions ten
    thousand times as much as float16 does, and float16 halves the bytes (docs/internals/benchmarks.md), so `auto` means float16.
    """
    name = parse_cache_dtype(config.cache.dtype)
    if name != "auto":
        return name
    return "float16" if rounded and dtype == "float32" else dtype


def prefers_bfloat16(config: EngineConfig, spec: ModelSpec, plan: StoragePlan, stored: str) -> bool:
    """Whether `auto` means bfloat16 on a CPU whose kernels multiply it natively: prompts take half the time for 0.0005 nats
    (docs/internals/benchmarks.md).

    Only for matrices that are stored in bfloat16. Not for experts and ranks, where it was not measured, and not if tokens must
    not depend on how a text was divided into chunks.
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


def weight_dtype(config: EngineConfig, model: ModelDescription, dtype: str, device: DeviceCapabilities) -> str:
    """The type of matrices that are not in blocks. `auto` on a CPU: the checkpoint's, if the kernels read it.

    The files determine it, not the config: a float32 file with a bfloat16 config keeps its precision.
    """
    if parse_dtype(config.compute.dtype) != "auto" or not device.is_cpu or not device.reads_16_bit:
        return dtype
    stored = _named_dtype(model) if config.loading.format == "dummy" else _stored_dtype(model)
    return stored if stored in ("bfloat16", "float16") else dtype


def _stored_dtype(model: ModelDescription) -> str | None:
    """The type of all plain matrices in the files; None if there are several, or one that the engine does not compute in."""
    others = set(model.quantized.sources if model.quantized is not None else ())
    # Scores, such as routers, are float32 here in any case, and often in the files too.
    others |= {one.name for weight in model.spec.weights() if weight.kind == "score" for one in weight.stored}
    found = {tensor.dtype for name, tensor in model.headers.items() if len(tensor.shape) > 1 and name not in others}
    kind = GGUF_TYPES.get(next(iter(found))) if len(found) == 1 else None
    return kind.storage if kind is not None and kind.is_plain else None


def check_cache_dtype(spec: ModelSpec, cached: str, device: DeviceCapabilities) -> None:
    """Raise LoadError if keys and values cannot be cached in this type."""
    if cached == "float8_e4m3fn" and device.is_cpu:
        raise LoadError(
            "`cache.dtype=fp8` is for GPUs: the kernels for CPUs do not support it. Use `cache.dtype=int8`, which has the same "
            "size and is more precise"
        )
    if cached == "int8" and not device.is_cpu and not all(group.cached_value_dim for group in spec.kv_groups):
        raise LoadError(
            "`cache.dtype=int8` with latent attention is for the CPU: there is no kernel for its rows on a GPU: use "
            "`cache.dtype=bfloat16` or leave it out"
        )


def storage_plan(config: EngineConfig, model: ModelDescription, stored: str, device: DeviceCapabilities) -> StoragePlan:
    """The storage of every weight. stored: the type of weights that are not in blocks.

    Matrices of single heads that the files have in blocks are dequantized. If activations are rounded to 8 bits anyway, these
    matrices are stored in float16, which rounds at most a sixteenth as much; deterministic steps use the full type.
    """
    quantization, storages = config.compute.quantization, {}
    own = parse_dtype(config.compute.dtype) == "auto" and device.reads_16_bit
    if model.gguf is not None and quantization == "none":
        storages = model.gguf.storages(plain=own)
    if model.quantized is not None and quantization == "none":
        storages = model.quantized.storages()
    rounds = own and stored == "float32" and config.compute.activations == "int8" and not config.compute.deterministic
    return plan_storage(model.spec, stored, quantization, storages, "float16" if rounds else None)


def describe_storage(config: EngineConfig, model: ModelDescription, plan: StoragePlan) -> str | None:
    """Name of the weights' quantization: "int8 (q8_0)", "GGUF Q4_1, Q8_0"; None if there is none."""
    if config.compute.quantization != "none":
        return f"{config.compute.quantization} ({', '.join(block_formats(model.spec, plan))})"
    if model.gguf is not None:
        return f"GGUF {', '.join(model.gguf.types())}"
    formats = block_formats(model.spec, plan)
    return f"{model.quantized.title} ({', '.join(formats)})" if model.quantized is not None and formats else None


def _storage_notices(model: ModelDescription, plan: StoragePlan, stored: str) -> tuple[str, ...]:
    """Notices on weights that are not stored as in their files."""
    if model.quantized is not None:
        blocks = bool(block_formats(model.spec, plan))
        return () if blocks and not model.is_quantized else model.quantized.notices(stored)
    if model.gguf is None or not model.gguf.is_quantized():
        return ()
    notice = model.gguf.requantization_notice()
    return () if notice is None else (notice,)


# -- Preparation of a model --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelToLoad:
    """A model, how it is loaded, and its sizes in memory.

    compute_dtype, weight_dtype, cache_dtype: names of the types of activations, of matrices that are not in blocks, and of
    cached keys and values. bf16_prefill: whether attention of prompts may round its factors, as products do already. full_plan:
    storage of all weights of the model. quantization: its name, None if nothing is quantized. shard: the rank shard that is
    loaded; None: the whole model. draft: the draft model or MTP head.
    """

    model: ModelDescription
    compute_dtype: str
    weight_dtype: str
    cache_dtype: str
    bf16_prefill: bool
    full_plan: StoragePlan
    quantization: str | None = None
    notices: tuple[str, ...] = ()
    shard: ModelShard | None = None
    draft: ModelToLoad | None = None

    @property
    def spec(self) -> ModelSpec:
        """The spec of what is loaded."""
        return self.model.spec if self.shard is None else self.shard.spec

    @property
    def plan(self) -> StoragePlan:
        """The storage of the weights that are loaded."""
        return self.full_plan if self.shard is None else self.shard.plan

    @property
    def unsharded(self) -> ModelToLoad:
        """All ranks together."""
        return replace(self, shard=None)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are loaded."""
        return total_weight_bytes(self.spec, self.plan, self.compute_dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache."""
        return sum(bytes_per_token(group, self.cache_dtype) for group in self.spec.kv_groups)

    def free_after_draft(self, device: DeviceCapabilities) -> int | None:
        """Free bytes once the draft's weights are loaded; None if unknown."""
        if device.free is None or self.draft is None:
            return device.free
        return max(0, device.free - self.draft.weight_bytes)

    def plan_cache(self, config: EngineConfig, budget: int, most: int | None = None) -> CachePlan:
        """Blocks of the KV cache within `budget` bytes, with those of the draft; see `kv_cache_budget.plan_cache`."""
        return plan_cache(
            config,
            self.spec.kv_groups,
            self.spec.trained_len,
            self.cache_dtype,
            budget,
            most,
            draft_token_bytes=0 if self.draft is None else self.draft.token_bytes,
            whole_prompts=self.spec.is_bidirectional,
            states=self.spec.state_group,
            draft_state_bytes=0 if self.draft is None else self.draft.spec.state_bytes,
        )


def check_start(config: EngineConfig) -> ModelDescription:
    """The model to be started. Raises LoadError, one line with the remedy, for a start that cannot succeed, as far as that
    can be determined without torch."""
    kind = expect_device(config.compute.device)
    check_tier_options(config)
    if kind is None:
        model = describe_model(config)
        draft = for_draft(config, lambda own, part: describe_model(own, part=part))
        if draft is not None:
            check_draft_compatible(config, model.spec, draft.spec)
        return model
    on_cpu = kind == "cpu"
    if not on_cpu:
        check_replicas(config, kind)
        check_rank_device(config.compute.device, config.compute.tensor_parallel)
    # Without compiled kernels, weights on a CPU take more memory; only torch knows a GPU's free memory. The loader checks again.
    prepared = prepare_model(config, DeviceCapabilities(kind, on_cpu, on_cpu, available_memory() if on_cpu else None))
    check_tier_support(
        config,
        prepared.unsharded.token_bytes,
        is_bidirectional=prepared.model.spec.is_bidirectional,
        on_device=not on_cpu,
    )
    return prepared.model


_MTP_NOTICE = "the model has an MTP layer, which is not in use: `scheduling.speculation.mtp` speeds up decoding with it"


def prepare_model(
    config: EngineConfig, device: DeviceCapabilities, *, rank: int = 0, part: MTPPart | None = None
) -> ModelToLoad:
    """The model, its types and its storage. Raises LoadError for a model that cannot be loaded or plainly does not fit.

    rank: of those of `compute.tensor_parallel`. part: what is loaded of the MTP head; None: the model is loaded.
    """
    if config.compute.quantization not in ("none", "int8", "int4"):
        raise LoadError(f"`compute.quantization={config.compute.quantization}` is not known: use none, int8 or int4")
    check_device_share(config, device)
    model = describe_model(config, part=part)
    draft = for_draft(config, lambda own, part: prepare_model(own, device, part=part))
    if draft is not None:
        check_draft_compatible(config, model.spec, draft.model.spec)
    dtype = compute_dtype(config, model, device)
    stored = weight_dtype(config, model, dtype, device)
    plan = storage_plan(config, model, stored, device)
    notices: tuple[str, ...] = ()
    if device.native_bfloat16 and prefers_bfloat16(config, model.spec, plan, stored):
        dtype, notices = "bfloat16", (BFLOAT16_NOTICE,)
    in_blocks = device.is_cpu and device.reads_16_bit and bool(block_formats(model.spec, plan))
    rounded = in_blocks and config.compute.activations == "int8"
    cached = cache_dtype(config, dtype, rounded=rounded)
    check_cache_dtype(model.spec, cached, device)
    called = describe_storage(config, model, plan)
    bf16_prefill = rounded or dtype == "bfloat16"
    prepared = ModelToLoad(model, dtype, stored, cached, bf16_prefill, plan, called, draft=draft)
    notices += _storage_notices(model, plan, stored)
    if config.compute.tensor_parallel > 1:
        prepared = replace(prepared, shard=_prepare_shard(config, prepared, rank))
        notices += _shard_notices(config, prepared, device)
    elif part is None and not config.scheduling.speculation.max_proposed_tokens:
        notices += (_MTP_NOTICE,) if has_usable_mtp_head(model.spec, model.headers) else ()
    if prepared.shard is None or device.is_cpu:  # all ranks share a CPU's memory
        check_memory(config, prepared.unsharded, device)
    else:
        left = replace(device, free=prepared.free_after_draft(device))
        check_memory(_shard_config(config, prepared), replace(prepared, draft=None), left)
    return replace(prepared, notices=notices)


# -- Memory ------------------------------------------------------------------------------------------------------------


def check_memory(config: EngineConfig, model: ModelToLoad, device: DeviceCapabilities) -> None:
    """Raise LoadError if the weights, or the KV cache in addition, plainly do not fit in free memory."""
    weights, engines, free = model.weight_bytes, config.replicas, model.free_after_draft(device)
    on = "" if device.is_cpu else " on cuda"
    if free is not None and weights > free:
        smaller = _smaller_options(model, free)
        raise LoadError(f"the weights need {gib(weights)} of memory, {gib(free)} are free{on}: {smaller}")
    left = None if free is None else free - weights
    if config.cache.memory is None and left is None:
        return
    # A GPU's total memory, and what a step needs of it, are known once the weights are loaded: the engine plans again then.
    share = default_kv_budget(left, engines) if left is None or device.is_cpu else left
    cache = model.plan_cache(config, config.cache.memory or share, None if left is None else left // engines)
    if left is not None and cache.num_bytes * engines > left:
        there = f"{gib(free or 0)} are free{on}, {gib(weights)} of it for the weights"
        raise LoadError(kv_cache_too_large(there, cache.num_bytes * engines, model.cache_dtype, engines))


def kv_cache_too_large(there: str, num_bytes: int, cached: str, engines: int = 1) -> str:
    """Error message for KV caches of this number of engines that do not fit. there: the available memory, in words."""
    less = "" if cached == "int8" else ", or use `cache.dtype=int8`"
    lower = f"`cache.memory`, `max_model_len` or `scheduling.max_num_seqs`{less}"
    if engines == 1:
        return f"the KV cache needs {gib(num_bytes)} of memory, {there}: lower {lower}"
    return f"the KV caches of {engines} replicas need {gib(num_bytes)} of memory, {there}: lower `replicas`, {lower}"


def _smaller_options(model: ModelToLoad, free: int) -> str:
    """Advice: options under which the weights fit, each with their size."""
    spec, choices = model.spec, list[tuple[str, int]]()
    if not model.model.is_quantized:
        if model.weight_dtype == "float32":
            plan = plan_storage(spec, "bfloat16")
            choices.append(("`compute.dtype=bfloat16`", total_weight_bytes(spec, plan, "bfloat16")))
        for quantization in ("int8", "int4"):
            plan = plan_storage(spec, model.weight_dtype, quantization)
            size = total_weight_bytes(spec, plan, model.compute_dtype)
            choices.append((f"`compute.quantization={quantization}`", size))
    fitting = [f"{option} ({gib(size)})" for option, size in choices if size < min(model.weight_bytes, free)]
    return f"use {', '.join(fitting)} or a smaller model" if fitting else "use a smaller model or free some memory"


# -- Rank shards -------------------------------------------------------------------------------------------------------

_TABLE_BYTES = 2  # approximate bytes of an element of an embedding, which every rank holds whole


def _prepare_shard(config: EngineConfig, prepared: ModelToLoad, rank: int) -> ModelShard:
    """The shard of a rank. Raises LoadError for options that several ranks do not support."""
    option, model = f"`compute.tensor_parallel={config.compute.tensor_parallel}`", prepared.model
    if model.quantized is not None:
        raise LoadError(
            f"{option}: a {model.quantized.title} checkpoint is not split: give the unquantized model with "
            "`compute.quantization=int8`, or a GGUF file"
        )
    if config.loading.format == "dummy":
        raise LoadError(f"{option} splits weights that are in files: leave `loading.format=dummy` out")
    if config.adapters.sources:
        raise LoadError(f"{option}: adapters are not split: leave `adapters.sources` out, or merge them into the model")
    for field, where in (("persist", config.cache.persist), ("host_memory", config.cache.host_memory)):
        if where is not None:
            raise LoadError(
                f"{option}: each rank caches its own heads, which are not stored anywhere else: leave `cache.{field}` out"
            )
    columns = None if model.gguf is None else model.gguf.block_columns()
    return shard_model(model.spec, prepared.full_plan, rank, config.compute.tensor_parallel, columns)


def _shard_notices(config: EngineConfig, prepared: ModelToLoad, device: DeviceCapabilities) -> tuple[str, ...]:
    """Notices on uneven heads, and on a CPU's cores and memory, which all ranks share."""
    assert prepared.shard is not None
    spec, ranks, engines = prepared.model.spec, prepared.shard.ranks, config.replicas
    heads = {layer.mixer.num_kv_heads for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)}
    found = [
        f"{count} key heads cannot be divided evenly among {ranks} ranks: ranks with fewer heads wait for the others"
        for count in sorted(count for count in heads if count % ranks)[:1]
    ]
    if not device.is_cpu:
        return tuple(found)
    own = config.compute.cores
    processes, cores = (ranks * engines, processors()) if own is None else (ranks, len(own))
    if own is not None and (quota := processor_quota()) is not None:  # all engines share the quota
        cores = max(1, min(cores, int(quota) // engines))
    if processes > cores:
        shared = "one core" if cores == 1 else f"{cores} cores"
        found.append(f"{processes} ranks share {shared}, and wait for each other: use fewer ranks")
    tables = [prod(one.shape) for one in spec.weights() if one.kind in ("table", "wide table", "table and head")]
    needed = engines * (prepared.unsharded.weight_bytes + (ranks - 1) * sum(tables) * _TABLE_BYTES)
    free = prepared.free_after_draft(device)
    if free is not None and needed > free:
        found.append(
            f"the weights of all ranks need {gib(needed)} of memory, but only {gib(free)} are free: use fewer ranks"
        )
    return tuple(found)


def _shard_config(config: EngineConfig, prepared: ModelToLoad) -> EngineConfig:
    """The configuration with this rank's share of `cache.memory`, which is for the caches of all ranks."""
    if config.cache.memory is None:
        return config
    own, whole = prepared.token_bytes, prepared.unsharded.token_bytes
    return replace(config, cache=replace(config.cache, memory=max(1, config.cache.memory * own // whole)))
