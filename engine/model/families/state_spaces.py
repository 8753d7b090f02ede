"""What config.json says of layers whose memory fades token by token (Mamba 2), under the names that a family has."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.model.families.carried_states import check_convolution_width
from windlass.engine.rotary.fields import format_value

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
