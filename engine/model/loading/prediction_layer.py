"""The layer in a model's files that predicts a token further: whether it is there, and can be used. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal, TypeAlias

from windlass.engine.api.config import SpeculationConfig
from windlass.engine.errors import LoadError
from windlass.engine.model.spec import ModelSpec

# What of a model predicts further tokens: its layer, or that with a copy of the head.
MTPPart: TypeAlias = Literal["layer", "layer and head"]

_MTP_OPTION = "`scheduling.speculation.mtp`"


def mtp(speculation: SpeculationConfig) -> MTPPart | None:
    """None where the model's layer does not draft. It has a copy of the head where its weights are quantized on their own, since
    reading the head is most of what a proposal takes."""
    if not speculation.mtp:
        return None
    return "layer" if speculation.quantization == "none" else "layer and head"


def has_usable_mtp_head(spec: ModelSpec, tensors: Collection[str]) -> bool:
    """Whether the files hold such a layer, and the model could be drafted for. tensors: names of all that they hold."""
    layer, groups = spec.mtp, spec.kv_groups
    if layer is None or not spec.generates or len(groups) > 1 or groups[0].window is not None:
        return False
    return any(name.startswith(layer.own[0]) for name in tensors)


def prediction_layer(spec: ModelSpec, tensors: Collection[str], what: MTPPart, *, in_gguf: bool) -> ModelSpec:
    """The specification of a model's prediction layer. tensors: names of all that the files hold, none where no file is read.

    in_gguf: they are of GGUF files. Raises LoadError where there is none.
    """
    layer = spec.mtp
    if not spec.generates:
        raise LoadError(f"{_MTP_OPTION}: the model is a {spec.architecture}, which generates nothing: leave it out")
    if layer is None:
        raise LoadError(
            f"{_MTP_OPTION}: this model ({spec.architecture}) has no layer that predicts further tokens, or none that can be used: "
            "leave it out"
        )
    if tensors and not any(name.startswith(layer.own[0]) for name in tensors):
        why, other = f"no tensor's name begins with {layer.own[0]!r}", "the files of the model's own publisher"
        if in_gguf:
            why = "no block has tensors whose names contain nextn, which some conversions leave out"
            other = "a conversion of the model that has them"
        raise LoadError(
            f"{_MTP_OPTION}: the files hold no layer that predicts further tokens ({why}): leave it out, or take {other}"
        )
    if what == "layer":
        return layer
    head = f"{spec.names.embedding if spec.tied_embeddings else spec.names.head}.weight"
    return replace(layer, mtp_head=head, own=(*layer.own, head))
