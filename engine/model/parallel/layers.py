"""What a rank has of a layer: heads of its attention, and a part of the inner width of its feed-forward. Imports no torch.

What the ranks make of their parts are summands: the output of a layer's part is their sum. So whatever is not linear has to
lie within what one rank has; what does not is refused, by a reason that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from windlass.engine.errors import LoadError
from windlass.engine.model.feed_forward.beside_spec import BesideSpec
from windlass.engine.model.feed_forward.experts_spec import ExpertsSpec
from windlass.engine.model.feed_forward.gated_spec import GatedSpec
from windlass.engine.model.feed_forward.plain_spec import PlainSpec
from windlass.engine.model.mixers.attention_spec import AttentionSpec
from windlass.engine.model.mixers.latent_spec import LatentSpec
from windlass.engine.model.parallel.shares import Run, WeightSlice, share
from windlass.engine.model.spec import FeedForwardSpec, StateMixerSpec

OPTION = "`compute.tensor_parallel`"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank this is, and of how many."""

    rank: int
    ranks: int


# Columns of a layer's weight, by its name, that cannot be cut further: a block of numbers with scales in common.
UnitOf = Callable[[str], int]


def split_attention(
    spec: AttentionSpec | LatentSpec | StateMixerSpec, seat: RankPlace, unit_of: UnitOf
) -> tuple[AttentionSpec, dict[str, WeightSlice]]:
    """A rank's own layer, and what it has of the whole one's weights, by their names in it; a weight that is not there is had
    whole. Raises LoadError."""
    if isinstance(spec, LatentSpec):
        raise refusal("latent attention is not split")
    if isinstance(spec, StateMixerSpec):
        raise refusal("a layer that carries a state is not split")
    if reason := _attention_refusal(spec):
        raise refusal(f"{reason} is not split")
    first, count = share(spec.num_kv_heads, seat.rank, seat.ranks)
    if spec.num_kv_heads < seat.ranks:
        raise LoadError(
            f"{OPTION} is {seat.ranks}, and the model has {spec.num_kv_heads} heads of keys: use {spec.num_kv_heads} or less"
        )
    queries, dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    heads: Run = (first * queries, count * queries)
    q, k = _times(heads, dim), _times((first, count), dim)
    q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
    fit(OPTION, q, q_size, unit_of("out"), "heads", seat)
    keys = 2 * q_size if spec.gated_queries else q_size
    parts = q, _behind(q, q_size), _behind(k, keys), _behind(k, keys + kv_size)
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


def _attention_refusal(spec: AttentionSpec) -> str | None:
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


def split_feed_forward(
    spec: FeedForwardSpec, seat: RankPlace, unit_of: UnitOf
) -> tuple[FeedForwardSpec, dict[str, WeightSlice]]:
    """As `split_attention`."""
    if isinstance(spec, ExpertsSpec):
        return _split_experts(spec, seat, unit_of)
    size = spec.intermediate_size
    own = _inner_share(size, seat, unit_of("down"))
    if isinstance(spec, PlainSpec):
        return replace(spec, intermediate_size=own[1]), _inner(own, size, gated=False)
    if spec.names.inner_norm is not None:
        raise refusal("a norm within the feed-forward is not split")
    return replace(spec, intermediate_size=own[1]), _inner(own, size, gated=True)


def split_beside(
    spec: BesideSpec | None, seat: RankPlace, unit_of: UnitOf
) -> tuple[BesideSpec | None, dict[str, WeightSlice]]:
    """As `split_attention`, of experts beside a feed-forward, whose norms are had whole."""
    if spec is None:
        return None, {}
    experts, slices = _split_experts(spec.experts, seat, lambda name: unit_of(f"beside.{name}"))
    return replace(spec, experts=experts), {f"beside.{name}": part for name, part in slices.items()}


def _split_experts(spec: ExpertsSpec, seat: RankPlace, unit_of: UnitOf) -> tuple[ExpertsSpec, dict[str, WeightSlice]]:
    """Every rank has a part of every expert: all of them meet the same tokens, and the router is had whole."""
    size = spec.intermediate_size
    own = _inner_share(size, seat, unit_of("experts.0.down"))
    of_expert = _inner(own, size, gated=spec.gated)
    slices = {f"experts.{index}.{name}": part for index in range(spec.experts) for name, part in of_expert.items()}
    result = replace(spec, intermediate_size=own[1])
    if spec.shared is not None and spec.shared_size is not None:
        shared = _inner_share(spec.shared_size, seat, unit_of("shared.down"))
        of_shared = _inner(shared, spec.shared_size, gated=isinstance(spec.shared, GatedSpec))
        slices |= {f"shared.{name}": part for name, part in of_shared.items()}
        result = replace(result, shared_size=shared[1])
    return result, slices


def _inner(own: Run, size: int, *, gated: bool) -> dict[str, WeightSlice]:
    name, up = ("gate_up", (own, _behind(own, size))) if gated else ("up", (own,))
    return {name: WeightSlice(up), f"{name}_bias": WeightSlice(up), **_down(own)}


def _down(own: Run) -> dict[str, WeightSlice]:
    return {"down": WeightSlice(columns=own), "down_bias": WeightSlice(first_only=True)}


def _inner_share(size: int, seat: RankPlace, unit: int) -> Run:
    """A part of the inner width; LoadError where there are fewer units of it than ranks."""
    if size // unit < seat.ranks:
        most = size // unit
        raise LoadError(
            f"{OPTION} is {seat.ranks}, and a feed-forward of width {size} is cut at multiples of {unit} only: "
            f"{f'use {most} or less' if most > 1 else 'leave it out'}, or another quantization"
        )
    return share(size, seat.rank, seat.ranks, unit)


def fit(option: str, own: Run, size: int, unit: int, what: str, seat: RankPlace) -> None:
    """LoadError where columns are not cut at the bounds of blocks."""
    first, count = own
    if first % unit or ((first + count) % unit and first + count != size):
        raise LoadError(
            f"{option} is {seat.ranks}, which cuts {size} columns of quantized weights at {first or count}, between {what}, and "
            f"their blocks have {unit}: use `compute.quantization=int8` of the unquantized model, or a number of ranks that fits"
        )


def refusal(what: str) -> LoadError:
    """For what no number of ranks would do."""
    return LoadError(f"{OPTION}: {what}: leave it out, or give another model")


def _times(run: Run, factor: int) -> Run:
    return run[0] * factor, run[1] * factor


def _behind(run: Run, first: int) -> Run:
    return run[0] + first, run[1]
