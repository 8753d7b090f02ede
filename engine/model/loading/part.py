"""Which part of a model a rank of `compute.tensor_parallel` loads, and what stands against splitting it. Imports no torch."""

from __future__ import annotations

from math import prod

from windlass.engine.api.config import EngineConfig
from windlass.engine.api.machine import processor_quota, processors
from windlass.engine.cache.memory import gib
from windlass.engine.errors import LoadError
from windlass.engine.model.loading.gguf_index import GGUFIndex, block_columns
from windlass.engine.model.mixers.attention_spec import AttentionSpec
from windlass.engine.model.parallel.split import ModelShard, shard_model
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.storage import StoragePlan, plan_bytes

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
