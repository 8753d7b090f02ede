"""Recurrent layers in config.json: which layers are recurrent, and the sizes of state-space layers (Mamba 2). Imports
no torch."""

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

_MAX_CONVOLUTION_WIDTH = 8  # of the kernels
# Keys of the state-space layers of Falcon H1 and Granite 4.
MAMBA_KEYS = frozenset(
    "mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads "
    "mamba_proj_bias time_step_limit".split()
)
MAX_SIZE = 1 << 16  # heads, groups of heads, and numbers of a head or a state: far above any model


def check_layer_types(kinds: list[str], other: str) -> list[str]:
    """The kinds of a model's layers, some of which attend to everything. other: name of the other layers. Raises
    LoadError."""
    if SLIDING_ATTENTION in kinds:
        raise LoadError(
            f"config.json: layer_types has {SLIDING_ATTENTION!r}: this model_type has {FULL_ATTENTION} and {other}"
        )
    if FULL_ATTENTION not in kinds:
        raise LoadError(
            f"config.json: no layer is {FULL_ATTENTION}: models with recurrent layers only are not supported"
        )
    return kinds


def check_convolution_width(key: str, width: int) -> None:
    """Raise LoadError for a convolution that the kernels do not support."""
    if not 2 <= width <= _MAX_CONVOLUTION_WIDTH:
        raise LoadError(f"config.json: {key} {width} is not supported: it may be 2 to {_MAX_CONVOLUTION_WIDTH}")


def with_recurrent_layers(
    spec: ModelSpec, kinds: list[str], mixer: RecurrentMixerSpec, recurrent_kind: str | None = None
) -> ModelSpec:
    """Replace the mixer of all layers that do not attend, or of those of `recurrent_kind`, in a spec with attention
    everywhere."""
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


def read_shape(config: Config, defaults: Mapping[str, int]) -> tuple[int, int, int, int, int]:
    """Heads, head size, groups of heads, state size and convolution width of a state-space layer.

    defaults: by key of config.json, in this order. Raises LoadError for sizes that do not fit together.
    """
    heads, head_dim, groups, state, width = (
        read_size(config, key, one, most=MAX_SIZE) for key, one in defaults.items()
    )
    of_heads, _, of_groups, _, of_width = defaults
    if heads % groups:
        raise LoadError(f"config.json: {of_heads} {heads} is not a multiple of {of_groups} {groups}")
    check_convolution_width(of_width, width)
    return heads, head_dim, groups, state, width


def read_mamba_shape(config: Config, inner: int, source: str) -> tuple[int, int, int, int, int]:
    """`read_shape` with the keys and defaults of Falcon H1 and Granite 4.

    inner: required number of values of all heads. source: where it comes from, for the message. Raises LoadError.
    """
    if config.get("mamba_d_head") in (None, "auto"):
        heads = read_size(config, "mamba_n_heads", 128, most=MAX_SIZE)
        config = {**config, "mamba_d_head": max(1, inner // heads)}
    shape = read_shape(
        config, {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
    )
    heads, head_dim, *_ = shape
    if heads * head_dim != inner:
        raise LoadError(f"config.json: mamba_n_heads {heads} of {head_dim} numbers are not {source}")
    return shape


def read_limits(config: Config) -> tuple[float, float]:
    """`time_step_limit`, the limits of a token's step size. transformers writes infinity as an object."""
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
