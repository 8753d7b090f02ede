"""Recurrent layers in config.json: which layers carry a state, and the sizes of state-space layers (Mamba 2). Imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.config_rules import Config, read_size
from windlass.engine.model.model_spec import ModelSpec, RecurrentMixerSpec
from windlass.engine.rotary.rope_scaling import FULL_ATTENTION, SLIDING_ATTENTION
from windlass.engine.rotary.scaling_fields import format_value

_MAX_CONVOLUTION_WIDTH = 8  # of convolutions


def check_layer_types(kinds: list[str], other: str) -> list[str]:
    """The kinds of a model's layers, of which some attend and see everything. other: what those are called that carry a state.

    Raises LoadError.
    """
    if SLIDING_ATTENTION in kinds:
        raise LoadError(
            f"config.json: layer_types has {SLIDING_ATTENTION!r}: this model_type has {FULL_ATTENTION} and {other}"
        )
    if FULL_ATTENTION not in kinds:
        raise LoadError(
            f"config.json: no layer is {FULL_ATTENTION}: a model that carries states alone, and caches no keys, is not supported"
        )
    return kinds


def check_convolution_width(key: str, width: int) -> None:
    """LoadError for a convolution that kernels do not have."""
    if not 2 <= width <= _MAX_CONVOLUTION_WIDTH:
        raise LoadError(f"config.json: {key} {width} is not supported: it may be 2 to {_MAX_CONVOLUTION_WIDTH}")


def with_recurrent_layers(
    spec: ModelSpec, kinds: list[str], mixer: RecurrentMixerSpec, recurrent_kind: str | None = None
) -> ModelSpec:
    """From the spec of a decoder all of whose layers attend to that with this mixer in those that do not, by their kinds.

    carrying: the kind that has it, where there are others yet; None: all that do not attend.
    """
    attending = tuple(index for index, kind in enumerate(kinds) if kind == FULL_ATTENTION)
    others = tuple(
        i for i, kind in enumerate(kinds) if (i not in attending if recurrent_kind is None else kind == recurrent_kind)
    )
    layers = [replace(layer, mixer=mixer) if i in others else layer for i, layer in enumerate(spec.layers)]
    (group,) = spec.kv_groups
    return replace(
        spec,
        layers=tuple(layers),
        kv_groups=(replace(group, layers=attending),),
        state_group=mixer.state_group(others) if others else None,
    )


def reject_unsupported_values(config: Config, known: Mapping[str, tuple[object, ...] | None]) -> None:
    """LoadError for what would make another model of it. known: values that change nothing; None: any."""
    for key, values in known.items():
        found = config.get(key)
        if values is not None and found is not None and found not in values:
            raise LoadError(
                f"config.json sets {key}={format_value(found)}, which changes the model and is not supported"
            )


MAX_SIZE = 1 << 16  # heads, their groups, and numbers of a head or a state: far above any model


def read_shape(config: Config, defaults: Mapping[str, int]) -> tuple[int, int, int, int, int]:
    """Heads, numbers of a head, groups of heads, numbers of a state and the width of the convolution.

    defaults: of these, under the names of config.json, in that order. Raises LoadError for what does not fit.
    """
    heads, head_dim, groups, state, width = (
        read_size(config, key, one, most=MAX_SIZE) for key, one in defaults.items()
    )
    of_heads, _, of_groups, _, of_width = defaults
    if heads % groups:
        raise LoadError(f"config.json: {of_heads} {heads} is not a multiple of {of_groups} {groups}")
    check_convolution_width(of_width, width)
    return heads, head_dim, groups, state, width


def read_limits(config: Config) -> tuple[float, float]:
    """`time_step_limit`, of the steps of tokens. transformers writes an infinite number as an object."""
    given = config.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    found = [math.inf if one == {"__float__": "Infinity"} else one for one in given] if isinstance(given, list) else []
    if len(found) != 2 or not all(map(_is_step, found)) or found[0] > found[1]:
        raise LoadError(
            f"config.json: time_step_limit must be two numbers, the smaller first, got {format_value(given)}"
        )
    return float(found[0]), float(found[1])


def _is_step(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= sys.float_info.max or value == math.inf
