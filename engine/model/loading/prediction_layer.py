"""The layer in a model's files that predicts a token further: whether it is there, and can be used. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from windlass.engine.errors import LoadError
from windlass.engine.model.spec import ModelSpec

_OPTION = "`scheduling.speculation.mtp`"


def prediction_layer(spec: ModelSpec, tensors: Collection[str], *, in_gguf: bool = False) -> ModelSpec:
    """The specification of a model's prediction layer. tensors: names of all that the files hold, none where no file is read.

    in_gguf: they are of GGUF files. Raises LoadError where there is none.
    """
    layer = spec.predicting
    if layer is None:
        raise LoadError(
            f"{_OPTION}: this model ({spec.architecture}) has no layer that predicts further tokens, or none that can be used: "
            "leave it out"
        )
    if tensors and not any(name.startswith(layer.own[0]) for name in tensors):
        why, other = f"no tensor's name begins with {layer.own[0]!r}", "the files of the model's own publisher"
        if in_gguf:
            why = "no block has tensors whose names contain nextn, which some conversions leave out"
            other = "a conversion of the model that has them"
        raise LoadError(
            f"{_OPTION}: the files hold no layer that predicts further tokens ({why}): leave it out, or take {other}"
        )
    return layer
