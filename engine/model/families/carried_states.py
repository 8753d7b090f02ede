"""What families share most of whose layers carry a state in place of reading cached keys: which layers do, and their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.values import Config
from windlass.engine.model.spec import ModelSpec, RecurrentMixerSpec
from windlass.engine.rotary.fields import format_value
from windlass.engine.rotary.scaling import FULL_ATTENTION, SLIDING_ATTENTION

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
