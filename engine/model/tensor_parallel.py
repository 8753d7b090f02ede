"""Tensor parallelism: one rank's specification, storage plan and slices of the weights.

A rank has some heads of each attention layer, a part of each feed-forward's inner width and a range of the vocabulary's
logits. The output of a layer is the sum over ranks, so every nonlinear operation must fit within one rank; otherwise
LoadError gives the reason. The embedding is replicated, because a step reads only one row per token. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from windlass.engine.errors import LoadError
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.feed_forward.moe import MoESpec, ParallelExpertsSpec
from windlass.engine.model.mixers.attention import AttentionSpec
from windlass.engine.model.mixers.latent_attention import LatentSpec
from windlass.engine.model.model_spec import FeedForwardSpec, ModelSpec, RecurrentMixerSpec
from windlass.engine.model.weight_storage import BLOCK_SIZES, StoragePlan, StoredPart, split_block_format

RowRange: TypeAlias = tuple[int, int]  # first row and number of rows
OPTION = "`compute.tensor_parallel`"


def shard_range(size: int, rank: int, ranks: int, unit: int = 1) -> RowRange:
    """A rank's part of `size` rows or columns, in whole units except at the end. Empty if there are fewer units than
    ranks."""
    units = size // unit
    first, end = units * rank // ranks * unit, units * (rank + 1) // ranks * unit
    return first, (size if rank == ranks - 1 else end) - first


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A rank's part of a weight."""

    rows: tuple[RowRange, ...] | None = None  # of the decoder's weight, in this order; None: all
    columns: RowRange | None = None  # None: all
    first_only: bool = False  # zeros on all other ranks, for a term that is added to a sum over ranks once

    def count(self, first: int, rows: int) -> int:
        """Number of the rank's rows among these rows of the weight."""
        return sum(end - begin for begin, end in self.within(first, rows))

    def within(self, first: int, rows: int) -> Iterable[tuple[int, int]]:
        """The rank's rows among these rows of the weight, as ranges [begin, end) relative to `first`."""
        if self.rows is None:
            yield 0, rows
            return
        for start, count in self.rows:
            begin, end = max(start, first), min(start + count, first + rows)
            if begin < end:
                yield begin - first, end - first


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """A rank, and the number of ranks."""

    rank: int
    ranks: int


# Number of columns of a layer's weight, by name, that must not be separated: a block of numbers with a common scale.
UnitOf = Callable[[str], int]


def shard_attention(
    spec: AttentionSpec | LatentSpec | RecurrentMixerSpec, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[AttentionSpec, dict[str, WeightSlice]]:
    """A rank's layer, and its slices of the weights by name; weights without a slice are replicated. Raises LoadError."""
    if isinstance(spec, LatentSpec):
        raise unsupported("latent attention is not split")
    if isinstance(spec, RecurrentMixerSpec):
        raise unsupported("a layer that carries a state is not split")
    if reason := _unsupported_attention(spec):
        raise unsupported(f"{reason} is not split")
    first, count = shard_range(spec.num_kv_heads, placement.rank, placement.ranks)
    if spec.num_kv_heads < placement.ranks:
        raise LoadError(
            f"{OPTION} is {placement.ranks}, and the model has {spec.num_kv_heads} heads of keys: use {spec.num_kv_heads} or less"
        )
    queries, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    heads: RowRange = (first * queries, count * queries)
    q, k = (heads[0] * dim, heads[1] * dim), (first * dim, count * dim)
    q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
    check_block_alignment(q, q_size, unit_of("out"), "heads", placement)
    keys = 2 * q_size if spec.gated_queries else q_size
    parts = q, _offset(q, q_size), _offset(k, keys), _offset(k, keys + kv_size)
    qkv = WeightSlice(tuple(part for part, heads in zip(parts, spec.projected_heads, strict=True) if heads))
    slices = {
        "qkv": qkv,
        "qkv_bias": qkv,
        "out": WeightSlice(columns=q),
        "out_bias": WeightSlice(first_only=True),
        "gate": WeightSlice((q,)),
        "sinks": WeightSlice((heads,)),
    }
    if spec.qk_norm == "by head":
        slices |= {"q_norm": WeightSlice((q,)), "k_norm": WeightSlice((k,))}
    return replace(spec, num_heads=heads[1], num_kv_heads=count), slices


def _unsupported_attention(spec: AttentionSpec) -> str | None:
    if spec.alibi:
        return "attention whose scores lose by distance (ALiBi)"
    if spec.qk_norm == "all heads":
        return "a norm of queries over all heads"
    if spec.qk_norm == "by head" and "{head}" in spec.names.q_norm:
        return "a norm with a tensor for each head"
    if spec.names.output_norm is not None:
        return "a norm of what attention gives, over all heads,"
    if spec.num_heads % spec.num_kv_heads:
        return "attention whose heads of queries do not share heads of keys evenly"
    return None


def shard_feed_forward(
    spec: FeedForwardSpec, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[FeedForwardSpec, dict[str, WeightSlice]]:
    """Same as `shard_attention`, for a feed-forward."""
    if isinstance(spec, MoESpec):
        return _shard_experts(spec, placement, unit_of)
    size = spec.intermediate_size
    own = _inner_range(size, placement, unit_of("down"))
    gated = isinstance(spec, GatedMLPSpec)
    if isinstance(spec, GatedMLPSpec) and spec.names.inner_norm is not None:
        raise unsupported("a norm within the feed-forward is not split")
    return replace(spec, intermediate_size=own[1]), _inner_slices(own, size, gated=gated)


def shard_parallel_experts(
    spec: ParallelExpertsSpec, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[ParallelExpertsSpec, dict[str, WeightSlice]]:
    """Same as `shard_attention`, for parallel experts. Their norms are replicated."""
    experts, slices = _shard_experts(spec.experts, placement, lambda name: unit_of(f"beside.{name}"))
    return replace(spec, experts=experts), {f"beside.{name}": part for name, part in slices.items()}


def _shard_experts(
    spec: MoESpec, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[MoESpec, dict[str, WeightSlice]]:
    """Every rank has a part of every expert, since all ranks compute the same tokens. The router is replicated."""
    size = spec.intermediate_size
    own = _inner_range(size, placement, unit_of("experts.0.down"))
    of_expert = _inner_slices(own, size, gated=spec.gated)
    slices = {f"experts.{index}.{name}": part for index in range(spec.experts) for name, part in of_expert.items()}
    result = replace(spec, intermediate_size=own[1])
    if spec.shared is not None and spec.shared_size is not None:
        shared = _inner_range(spec.shared_size, placement, unit_of("shared.down"))
        of_shared = _inner_slices(shared, spec.shared_size, gated=isinstance(spec.shared, GatedMLPSpec))
        slices |= {f"shared.{name}": part for name, part in of_shared.items()}
        result = replace(result, shared_size=shared[1])
    return result, slices


def _inner_slices(own: RowRange, size: int, *, gated: bool) -> dict[str, WeightSlice]:
    name, up = ("gate_up", (own, _offset(own, size))) if gated else ("up", (own,))
    return {
        name: WeightSlice(up),
        f"{name}_bias": WeightSlice(up),
        "down": WeightSlice(columns=own),
        "down_bias": WeightSlice(first_only=True),
    }


def _inner_range(size: int, placement: TensorParallelRank, unit: int) -> RowRange:
    """A part of the inner width. Raises LoadError if it has fewer units than there are ranks."""
    if size // unit < placement.ranks:
        most = size // unit
        raise LoadError(
            f"{OPTION} is {placement.ranks}, and a feed-forward of width {size} is cut at multiples of {unit} only: "
            f"{f'use {most} or less' if most > 1 else 'leave it out'}, or another quantization"
        )
    return shard_range(size, placement.rank, placement.ranks, unit)


def check_block_alignment(own: RowRange, size: int, unit: int, what: str, placement: TensorParallelRank) -> None:
    """Raise LoadError if columns are not cut at block boundaries."""
    first, count = own
    if first % unit or ((first + count) % unit and first + count != size):
        raise LoadError(
            f"{OPTION} is {placement.ranks}, which cuts {size} columns of quantized weights at {first or count}, between {what}, "
            f"and their blocks have {unit}: use `compute.quantization=int8` of the unquantized model, or a number of ranks "
            "that fits"
        )


def unsupported(what: str) -> LoadError:
    """Error for a model that cannot be split over any number of ranks."""
    return LoadError(f"{OPTION}: {what}: leave it out, or give another model")


def _offset(rows: RowRange, first: int) -> RowRange:
    return rows[0] + first, rows[1]


_VOCABULARY_UNIT = 16  # rows of a panel, so that a shard of a panel weight is contiguous memory


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part of a model."""

    rank: int
    ranks: int
    full_spec: ModelSpec
    spec: ModelSpec  # of the part
    plan: StoragePlan  # of the part
    slices: Mapping[str, WeightSlice]  # by name of the weight; the others are replicated
    columns: tuple[int, ...]  # number of logits of each rank


def shard_model(
    spec: ModelSpec, plan: StoragePlan, rank: int, ranks: int, file_units: Mapping[str, int] | None = None
) -> ModelShard:
    """A rank's part of a model with this storage plan. Raises LoadError if the model cannot be split over `ranks`
    ranks.

    file_units: by checkpoint tensor, the number of columns that must not be separated in its file format.
    """
    placement, slices, layers = TensorParallelRank(rank, ranks), dict[str, WeightSlice](), []
    units = _units(spec, plan, file_units or {})
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}."

        def unit_of(name: str, prefix: str = prefix) -> int:
            return units.get(prefix + name, 1)

        if layer.mixer is None or layer.feed_forward is None:
            raise unsupported("a layer of one part alone is not split")
        if layer.parallel_state_space is not None:
            raise unsupported("a layer that carries a state is not split")
        mixer, own_slices = shard_attention(layer.mixer, placement, unit_of)
        feed_forward, of_feed_forward = shard_feed_forward(layer.feed_forward, placement, unit_of)
        own_slices |= of_feed_forward
        layer = replace(layer, mixer=mixer, feed_forward=feed_forward)
        if layer.parallel_experts is not None:
            experts, of_experts = shard_parallel_experts(layer.parallel_experts, placement, unit_of)
            own_slices |= of_experts
            layer = replace(layer, parallel_experts=experts)
        slices |= {prefix + name: part for name, part in own_slices.items()}
        layers.append(layer)
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
    """By name of the weight, the number of columns that must not be separated."""
    result = {}
    for weight in spec.weights():
        units = [_unit(part.storage) for part in plan.get(weight.name, ())]
        units += [file_units[tensor.name] for tensor in weight.stored if tensor.name in file_units]
        result[weight.name] = max(units, default=1)
    return result


def _unit(storage: str) -> int:
    name, supers = split_block_format(storage)
    size = BLOCK_SIZES.get(name)
    return 1 if size is None else size.group * max(1, size.super_groups if supers is None else supers)


def _shard_plan(spec: ModelSpec, plan: StoragePlan, slices: Mapping[str, WeightSlice]) -> StoragePlan:
    """Storage plan of a rank's rows."""
    result = {}
    for name, parts in plan.items():
        own, first, part = slices.get(name, WeightSlice()), 0, list[StoredPart]()
        for each in parts:
            if rows := own.count(first, each.rows):
                part.append(StoredPart(rows, each.storage))
            first += each.rows
        result[name] = tuple(part)
    return result
