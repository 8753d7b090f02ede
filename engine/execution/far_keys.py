"""Keys that are kept a second time, as they seem from far away: where they are rotated, and how queries are turned to meet them.

Responsible for the numbers alone, as `Distances` defines them: near w, group G, slope. It knows no sequence, no block and no
kernel.
"""

from __future__ import annotations

from collections import abc

import numpy as np
from numpy.typing import NDArray

from windlass.engine.rotary.distances import Distances


def second_key_positions(
    rules: abc.Sequence[Distances], counts: NDArray[np.int64], positions: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float64] | None]:
    """Of T tokens whether they are kept so, at which position, and at which share of the frequencies; None: all at the whole.

    rules, counts: of every chunk, its distances and tokens. positions: [T], where the tokens stand.
    """
    has_copy = np.array([rule.has_second_keys for rule in rules]).repeat(counts)
    slopes = np.array([rule.slope if rule.has_second_keys and rule.group is None else 1.0 for rule in rules])
    groups = np.array([rule.group or 1 for rule in rules], dtype=np.int64).repeat(counts)
    return has_copy, positions // groups, slopes.repeat(counts) if (slopes != 1).any() else None


def rotation_to_second_keys(rule: Distances, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """By how much queries at these positions are turned on before they meet far keys, at 1 - slope of the frequencies.

    With a group a query at i then stands at i // G + w - w // G, without one at w + (i - w) slope: (i - w)(1 - slope) less.
    """
    near, group = rule.near, rule.group
    if near is None:
        raise ValueError("the rule keeps no far keys")
    return near - positions if group is None else positions // group + near - near // group - positions
