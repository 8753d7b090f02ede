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


def int8_recipe(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """A signed byte each, with a scale for every 32. A table of its own is only gathered from, a row per token."""
    return None if weight.kind == "table" else "q8_0"


# A model this narrow has less to spare: rounding all of SmolLM2 135M to 4 bits costs 22 % of perplexity, a wide model a few.
_NARROW = 1024
# Storages by role. Measured on SmolLM2 135M, each role alone at 4 bits: values cost 6.6 % of perplexity for 3 % of the
# weights, down 6.1 % and up 4.3 % for a quarter each, gate 1.3 %, keys 0.8 %, out 0.6 %, queries 0.5 %.
_NARROW_MATRICES = {"q": "q5_k", "k": "q6_k", "v": "q6_k", "q k v": "q6_k", "gate": "q4_k"}
_WIDE_MATRICES = {"v": "q6_k", "q k v": "q5_k"}


def int4_recipe(weight: WeightSpec, tensor: StoredTensor, spec: ModelSpec) -> str | None:
    """4 bits where that costs little, more where it costs much; no more bytes than llama.cpp's Q4_K_M has."""
    if weight.kind == "table":
        return None
    narrow = spec.hidden_size < _NARROW
    if weight.kind not in ("matrix", "expert") or tensor.role is None:
        return "q8_0" if narrow else "q6_k"
    if narrow:
        return _NARROW_MATRICES.get(tensor.role, "q5_k")
    if tensor.role == "down" and _is_sensitive_layer(int(weight.name.split(".")[1]), len(spec.layers)):
        return "q5_k"
    return _WIDE_MATRICES.get(tensor.role, "q4_k")


def _is_sensitive_layer(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers and every third between, as llama.cpp has it in its mixtures."""
    eighth = layers // 8
    return layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2


RECIPES: dict[str, Recipe] = {"int8": int8_recipe, "int4": int4_recipe}
