"""What a rank has of a layer: heads of its attention, and a part of the inner width of its feed-forward. Imports no torch.

What the ranks make of their parts are summands: the output of a layer's part is their sum. So whatever is not linear has to
lie within what one rank has; what does not is refused, by a reason that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.engine.errors import LoadError
from windlass.engine.model.feed_forward.beside_spec import ParallelExpertsSpec
from windlass.engine.model.feed_forward.experts_spec import MoESpec
from windlass.engine.model.feed_forward.gated_spec import GatedMLPSpec
from windlass.engine.model.feed_forward.plain_spec import PlainMLPSpec
from windlass.engine.model.mixers.attention_spec import AttentionSpec
from windlass.engine.model.mixers.latent_spec import LatentSpec
from windlass.engine.model.parallel.shares import RowRange, WeightSlice, shard_range
from windlass.engine.model.spec import FeedForwardSpec, RecurrentMixerSpec

OPTION = "`compute.tensor_parallel`"


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """Which rank this is, and of how many."""

    rank: int
    ranks: int


# Columns of a layer's weight, by its name, that cannot be cut further: a block of numbers with scales in common.
UnitOf = Callable[[str], int]


def shard_attention(
    spec: AttentionSpec | LatentSpec | RecurrentMixerSpec, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[AttentionSpec, dict[str, WeightSlice]]:
    """A rank's own layer, and what it has of the whole one's weights, by their names in it; a weight that is not there is had
    whole. Raises LoadError."""
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
    q, k = _scaled(heads, dim), _scaled((first, count), dim)
    q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
    check_block_alignment(OPTION, q, q_size, unit_of("out"), "heads", placement)
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
    """As `shard_attention`."""
    if isinstance(spec, MoESpec):
        return _shard_experts(spec, placement, unit_of)
    size = spec.intermediate_size
    own = _inner_range(size, placement, unit_of("down"))
    if isinstance(spec, PlainMLPSpec):
        return replace(spec, intermediate_size=own[1]), _inner_slices(own, size, gated=False)
    if spec.names.inner_norm is not None:
        raise unsupported("a norm within the feed-forward is not split")
    return replace(spec, intermediate_size=own[1]), _inner_slices(own, size, gated=True)


def shard_parallel_experts(
    spec: ParallelExpertsSpec | None, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[ParallelExpertsSpec | None, dict[str, WeightSlice]]:
    """As `shard_attention`, of experts beside a feed-forward, whose norms are had whole."""
    if spec is None:
        return None, {}
    experts, slices = _shard_experts(spec.experts, placement, lambda name: unit_of(f"beside.{name}"))
    return replace(spec, experts=experts), {f"beside.{name}": part for name, part in slices.items()}


def _shard_experts(
    spec: MoESpec, placement: TensorParallelRank, unit_of: UnitOf
) -> tuple[MoESpec, dict[str, WeightSlice]]:
    """Every rank has a part of every expert: all of them meet the same tokens, and the router is had whole."""
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
    return {name: WeightSlice(up), f"{name}_bias": WeightSlice(up), **_down(own)}


def _down(own: RowRange) -> dict[str, WeightSlice]:
    return {"down": WeightSlice(columns=own), "down_bias": WeightSlice(first_only=True)}


def _inner_range(size: int, placement: TensorParallelRank, unit: int) -> RowRange:
    """A part of the inner width; LoadError where there are fewer units of it than ranks."""
    if size // unit < placement.ranks:
        most = size // unit
        raise LoadError(
            f"{OPTION} is {placement.ranks}, and a feed-forward of width {size} is cut at multiples of {unit} only: "
            f"{f'use {most} or less' if most > 1 else 'leave it out'}, or another quantization"
        )
    return shard_range(size, placement.rank, placement.ranks, unit)


def check_block_alignment(
    option: str, own: RowRange, size: int, unit: int, what: str, placement: TensorParallelRank
) -> None:
    """LoadError where columns are not cut at the bounds of blocks."""
    first, count = own
    if first % unit or ((first + count) % unit and first + count != size):
        raise LoadError(
            f"{option} is {placement.ranks}, which cuts {size} columns of quantized weights at {first or count}, between {what}, and "
            f"their blocks have {unit}: use `compute.quantization=int8` of the unquantized model, or a number of ranks that fits"
        )


def unsupported(what: str) -> LoadError:
    """For what no number of ranks would do."""
    return LoadError(f"{OPTION}: {what}: leave it out, or give another model")


def _scaled(run: RowRange, factor: int) -> RowRange:
    return run[0] * factor, run[1] * factor


def _offset(run: RowRange, first: int) -> RowRange:
    return run[0] + first, run[1]
