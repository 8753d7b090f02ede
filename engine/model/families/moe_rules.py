"""MoE rules: config.json keys that describe experts, their defaults, and the layers that have them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, read_flag, read_number, read_size
from windlass.engine.model.feed_forward.mlp import Activation
from windlass.engine.model.feed_forward.moe import MoENames, MoESpec, RouterSpec

# Whether the layer with this index has no experts. Raises LoadError.
DenseLayer = Callable[[Config, int], bool]


def no_dense_layers(config: Config, index: int) -> bool:
    return False


def first_layers_dense(key: str, default: int) -> DenseLayer:
    """The first layers have no experts: `key` is their number, or `mlp_layer_types` lists them."""

    def is_dense(config: Config, index: int) -> bool:
        kinds = config.get("mlp_layer_types")
        if isinstance(kinds, list) and index < len(kinds) and kinds[index] in ("dense", "sparse"):
            return bool(kinds[index] == "dense")
        return index < read_count(config, key, default)

    return is_dense


def every_nth_layer(config: Config, index: int) -> bool:
    """Every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers` (Qwen)."""
    without = config.get("mlp_only_layers") or []
    if not isinstance(without, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in without):
        raise LoadError("config.json: mlp_only_layers must be a list of the numbers of layers")
    return index in without or (index + 1) % read_size(config, "decoder_sparse_step", 1) != 0


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Expert of every token: its width is under `width_key`, or it is as wide as `count_key` experts together.

    default: of the width or of the count.
    """

    width_key: str | None = None
    count_key: str | None = None
    default: int = 1

    def width(self, config: Config, expert: int) -> int | None:
        """Width of the shared expert; None if there is none. expert: width of the other experts."""
        if self.width_key is not None:
            return read_count(config, self.width_key, self.default) or None
        if self.count_key is not None:
            return read_count(config, self.count_key, self.default) * expert or None
        return expert * self.default


@dataclass(frozen=True, slots=True)
class MoERules:
    """Keys of config.json that describe experts, and their defaults. Of several keys the first one present is read."""

    experts: int
    top_k: int  # experts per token
    counts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    width_keys: tuple[str, ...] = ("moe_intermediate_size",)
    width: int | None = None
    router: RouterSpec = field(default_factory=RouterSpec)  # defaults of what the keys below set
    normalized_key: str | None = None  # whether weights are divided by their sum
    scale_key: str | None = None  # multiplies the weights
    grouped: bool = False  # whether `n_group` and `topk_group` are read
    jitter_key: str | None = None
    least_sum_key: str | None = None
    bias: bool = False  # of the experts' projections
    clamp_keys: tuple[str, str] | None = None  # alpha and limit of gpt-oss's activation
    clamp: tuple[float, float] = (1.702, 7.0)
    scaled_inputs: bool = False  # see `MoESpec`
    shared: SharedExpert | None = None
    dense: DenseLayer = no_dense_layers
    names: MoENames = field(default_factory=MoENames)
    more_keys: frozenset[str] = frozenset()  # further keys, read elsewhere or with a fixed meaning

    @property
    def keys(self) -> frozenset[str]:
        """All keys of config.json that describe experts."""
        single = (self.normalized_key, self.scale_key, self.jitter_key, self.least_sum_key)
        shared = () if self.shared is None else (self.shared.width_key, self.shared.count_key)
        groups = ("n_group", "topk_group") if self.grouped else ()
        clamp = self.clamp_keys or ()
        keys = (*clamp, *self.counts, *self.top_k_keys, *self.width_keys, *single, *shared, *groups)
        return frozenset(key for key in keys if key is not None) | self.more_keys


def read_experts(config: Config, rules: MoERules, activation: Activation, bias: bool) -> MoESpec:
    """MoE of a layer. bias: of the shared expert's projections. Raises LoadError."""
    count_key, top_k_key = _present(config, rules.counts), _present(config, rules.top_k_keys)
    width_key = _present(config, rules.width_keys)
    count = read_size(config, count_key, rules.experts)
    top_k = read_size(config, top_k_key, rules.top_k)
    width = read_size(config, width_key, rules.width)
    router = replace(rules.router, top_k=top_k)
    if rules.normalized_key is not None:
        router = replace(router, normalized=read_flag(config, rules.normalized_key, router.normalized))
    if rules.scale_key is not None:
        router = replace(router, scale=read_number(config, rules.scale_key) or router.scale)
    if rules.jitter_key is not None:
        router = replace(router, jitter=_at_least_zero(config, rules.jitter_key, router.jitter))
    if rules.least_sum_key is not None:
        router = replace(router, least_sum=_at_least_zero(config, rules.least_sum_key, router.least_sum))
    if rules.grouped:
        groups = read_size(config, "n_group", router.groups)
        router = replace(router, groups=groups, top_groups=read_size(config, "topk_group", router.top_groups))
    if (refusal := router.refusal(count)) is not None:
        raise LoadError(f"config.json: {count_key} {count} and {top_k_key} {top_k} do not go together: {refusal}")
    return MoESpec(
        experts=count,
        intermediate_size=width,
        router=router,
        activation=activation,
        bias=rules.bias,
        clamp=None
        if rules.clamp_keys is None
        else (
            read_number(config, rules.clamp_keys[0]) or rules.clamp[0],
            read_number(config, rules.clamp_keys[1]) or rules.clamp[1],
        ),
        shared_size=None if rules.shared is None else rules.shared.width(config, width),
        shared_bias=bias,
        scaled_inputs=rules.scaled_inputs,
        names=rules.names,
    )


def read_count(config: Config, key: str, default: int) -> int:
    """A number that may be zero. Raises LoadError."""
    value = config.get(key)
    if (default if value is None else value) == 0 and value is not False:
        return 0
    return read_size(config, key, default)


def _present(config: Config, keys: tuple[str, ...]) -> str:
    return next((key for key in keys if config.get(key) is not None), keys[0])


def _at_least_zero(config: Config, key: str, default: float) -> float:
    if config.get(key) == 0 and config[key] is not False:
        return 0.0
    value = read_number(config, key)
    return default if value is None else value


UNNORMALIZED_ROUTER = RouterSpec(normalized=False)
