"""What `compute.quantization` makes of each weight: the one place that says which of them gets how many bits.

A recipe is a function of a tensor and the model it belongs to. Where the tensors lie and how they are filled is the business
of others. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.weight_spec import StoredTensor, WeightSpec

# From one tensor of a weight, as a checkpoint has it, to the name of its storage; None: it stays as it is. Neighbouring
# tensors of a weight with different storages are parts of their own.
Recipe: TypeAlias = Callable[[WeightSpec, StoredTensor, ModelSpec], str | None]


def eight_bits(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """A signed byte each, with a scale for every 32. A table of its own is only gathered from, a row per token."""
    return None if weight.kind == "table" else "q8_0"


def four_bits(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """Matrices of the layers get 4 bits, what makes the logits gets 6."""
    if weight.kind == "table":
        return None
    return "q4_k" if weight.kind == "matrix" else "q6_k"


RECIPES: dict[str, Recipe] = {"int8": eight_bits, "int4": four_bits}
