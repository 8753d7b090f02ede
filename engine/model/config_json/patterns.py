"""Patterns of layers that several families share. One of a single family stands with that family.

A pattern says of each layer what it sees ("full_attention" or "sliding_attention") and which rotary group it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.values import Config, read_size
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What config.json says of the layers under names that every family shares.

    given: `layer_types`, None where it says nothing. rotates: whether each layer does. windowed: there is a `sliding_window`.
    """

    count: int
    given: list[str] | None
    rotates: list[bool]
    windowed: bool


# What each layer sees and the rotary group of each, both by the names of `rotary.scaling.GROUP_NAMES`. Raises LoadError.
# None: the layer does not rotate.
Pattern = Callable[[Config, LayerFacts], tuple[Sequence[str], Sequence[str | None]]]


def full_attention_layers(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Every layer sees everything, and all rotate alike."""
    full = [FULL_ATTENTION] * facts.count
    _refuse_mixture(config, facts, full)
    return full, full


def nope_layers(config: Config, facts: LayerFacts) -> tuple[list[str], list[None]]:
    """Every layer sees everything, and none rotates."""
    full = [FULL_ATTENTION] * facts.count
    _refuse_mixture(config, facts, full)
    return full, [None] * facts.count


def sliding_window_layers(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """Every layer sees `sliding_window` tokens, or everything where that is null; all rotate alike."""
    full, sliding = [FULL_ATTENTION] * facts.count, [SLIDING_ATTENTION] * facts.count
    _refuse_mixture(config, facts, sliding if facts.windowed else full)
    return sliding, full


def layer_types_pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str]]:
    """What `layer_types` says, or that every layer sees `sliding_window` tokens; all rotate alike."""
    full = [FULL_ATTENTION] * facts.count
    if not facts.windowed:
        return full, full
    return facts.given or [SLIDING_ATTENTION] * facts.count, full


def every_nth_full(interval: int, *, first: bool = False, groups: bool = False) -> Pattern:
    """Every n-th layer sees everything, the others `sliding_window` tokens; `layer_types` says it layer by layer.

    first: the first of each n layers does, instead of the last. groups: the two kinds may rotate differently.
    """

    def pattern(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
        full = [FULL_ATTENTION] * facts.count
        own = [i % interval == (0 if first else interval - 1) for i in range(facts.count)]
        kinds = facts.given or [FULL_ATTENTION if one else SLIDING_ATTENTION for one in own]
        if not facts.windowed:
            kinds = full
        return kinds, list(kinds if groups else full)

    return pattern


def local_layers_rotate(config: Config, facts: LayerFacts) -> tuple[list[str], list[str | None]]:
    """Every n-th layer, the fourth by default, sees everything and does not rotate; the others see a window and do."""
    kinds, groups = every_nth_full(read_size(config, "sliding_window_pattern", 4))(config, facts)
    return list(kinds), [
        group if kind == SLIDING_ATTENTION else None for kind, group in zip(kinds, groups, strict=True)
    ]


def _refuse_mixture(config: Config, facts: LayerFacts, expected: list[str]) -> None:
    if facts.given and facts.given != expected:
        raise LoadError(
            f"config.json: layer_types mixes windows in a way that model_type {format_value(config.get('model_type'))} does not: "
            "remove it"
        )
