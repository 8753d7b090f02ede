"""What a rank has of a model: a specification and a storage plan of its own, and its slices of the whole one's weights.

Responsible for the outside of the layers: which rows of the vocabulary a rank forms the logits of, which heads of each KV group
it caches. The embedding is had whole, as a step reads a row of it for each token: to split it would cost a sum more and save
no time. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from windlass.engine.errors import LoadError
from windlass.engine.model.parallel.layers import (
    OPTION,
    TensorParallelRank,
    shard_attention,
    shard_feed_forward,
    shard_parallel_experts,
    unsupported,
)
from windlass.engine.model.parallel.shares import WeightSlice, shard_range
from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.storage import BLOCK_SIZES, StoragePlan, StoredPart, split_block_format

_VOCABULARY_UNIT = 16  # rows of a panel: a part of a weight in panels is a part of its memory


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part. whole: what it is of. spec, plan: its own. slices: by the names of weights; the others are had whole.

    columns: how many logits each rank forms.
    """

    rank: int
    ranks: int
    whole: ModelSpec
    spec: ModelSpec
    plan: StoragePlan
    slices: Mapping[str, WeightSlice]
    columns: tuple[int, ...]


def shard_model(
    spec: ModelSpec, plan: StoragePlan, rank: int, ranks: int, file_units: Mapping[str, int] | None = None
) -> ModelShard:
    """A rank's part of a model that is stored so. Raises LoadError for a model that is not split, or not into so many.

    file_units: by the names of a checkpoint's tensors, how many columns cannot be cut as they lie in the file.
    """
    placement, slices, layers = TensorParallelRank(rank, ranks), dict[str, WeightSlice](), []
    units = _units(spec, plan, file_units or {})
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}."

        def unit_of(name: str, prefix: str = prefix) -> int:
            return units.get(prefix + name, 1)

        if layer.mixer is None or layer.feed_forward is None:
            raise unsupported("a layer of one part alone is not split")
        if layer.state is not None:
            raise unsupported("a layer that carries a state is not split")
        mixer, of_mixer = shard_attention(layer.mixer, placement, unit_of)
        feed_forward, of_feed_forward = shard_feed_forward(layer.feed_forward, placement, unit_of)
        slices |= {prefix + name: part for name, part in (of_mixer | of_feed_forward).items()}
        parallel_experts, expert_slices = shard_parallel_experts(layer.parallel_experts, placement, unit_of)
        slices |= {prefix + name: part for name, part in expert_slices.items()}
        layers.append(replace(layer, mixer=mixer, feed_forward=feed_forward, parallel_experts=parallel_experts))
    vocabulary = [shard_range(spec.vocab_size, each, ranks, _VOCABULARY_UNIT) for each in range(ranks)]
    own = vocabulary[rank]
    if spec.generates:
        if min(count for _, count in vocabulary) < 1:
            raise LoadError(f"{OPTION} is {ranks}, too many for a vocabulary of {spec.vocab_size} tokens: use fewer")
        slices |= {"head": WeightSlice((own,)), "head_bias": WeightSlice((own,))}
    kv_groups = tuple(
        replace(group, num_kv_heads=shard_range(group.num_kv_heads, rank, ranks)[1]) for group in spec.kv_groups
    )
    part = replace(spec, layers=tuple(layers), kv_groups=kv_groups, vocabulary=own if spec.generates else None)
    names = {weight.name for weight in spec.weights()}
    own_slices = {name: one for name, one in slices.items() if name in names}
    columns = tuple(count for _, count in vocabulary)
    return ModelShard(rank, ranks, spec, part, _shard_plan(spec, plan, own_slices), own_slices, columns)


def _units(spec: ModelSpec, plan: StoragePlan, file_units: Mapping[str, int]) -> dict[str, int]:
    """By the name of a weight, how many of its columns cannot be cut."""
    found = {}
    for weight in spec.weights():
        units = [_unit(part.storage) for part in plan.get(weight.name, ())]
        units += [file_units[tensor.name] for tensor in weight.stored if tensor.name in file_units]
        found[weight.name] = max(units, default=1)
    return found


def _unit(storage: str) -> int:
    name, supers = split_block_format(storage)
    size = BLOCK_SIZES.get(name)
    return 1 if size is None else size.group * max(1, size.super_groups if supers is None else supers)


def _shard_plan(spec: ModelSpec, plan: StoragePlan, slices: Mapping[str, WeightSlice]) -> StoragePlan:
    """The storages of the rows that a rank has."""
    found = {}
    for name, parts in plan.items():
        own, first, part = slices.get(name, WeightSlice()), 0, list[StoredPart]()
        for each in parts:
            if rows := own.count(first, each.rows):
                part.append(StoredPart(rows, each.storage))
            first += each.rows
        found[name] = tuple(part)
    return found
