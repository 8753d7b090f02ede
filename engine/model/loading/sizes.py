"""What a model's weights take in memory, from its spec alone. Knows neither files nor torch."""

from __future__ import annotations

from collections import Counter
from math import prod

from windlass.engine.model.spec import ModelSpec
from windlass.engine.model.weight_spec import WeightKind

_INT4_BYTES = 0.5 + 2 / 32  # half a byte, and for every 32 of them a scale of two bytes


def weight_bytes(spec: ModelSpec, item_bytes: int, quantization: str = "none") -> int:
    """Bytes of all matrices, a little less than what loading takes: padding, norms and biases are not counted.

    item_bytes: of an element that is not quantized. quantization: none, int8 or int4, as `compute.quantization` has it.
    """
    sizes: Counter[WeightKind] = Counter()
    for weight in spec.weights():
        sizes[weight.kind] += prod(weight.shape)
    matrices, tables, heads = sizes["matrix"], sizes["table"], sizes["head"] + sizes["table and head"]
    if quantization == "none":
        return (matrices + tables + heads) * item_bytes
    return int(matrices * (1 if quantization == "int8" else _INT4_BYTES)) + heads + tables * item_bytes
