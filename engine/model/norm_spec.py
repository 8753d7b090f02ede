"""The description of a norm: what it does to a row, and its weights with their names in checkpoints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.model.weight_spec import InterleavedHeads, StoredTensor, WeightSpec, norm


@dataclass(frozen=True, slots=True)
class NormSpec:
    """centered: the mean is taken off first (LayerNorm, 1607.06450), else the norm is by the root mean square (1910.07467).

    weight: what it gives is multiplied by one.
    """

    centered: bool = False
    bias: bool = False
    weight: bool = True

    def weights(
        self, name: str, stored: str, size: int, interleaved: InterleavedHeads | None = None
    ) -> tuple[WeightSpec, ...]:
        """name: of the weight, its bias is "<name>_bias". stored: the tensors' name without ".weight" or ".bias"."""
        if not self.weight:
            return ()
        weight = norm(name, stored, size, interleaved)
        if not self.bias:
            return (weight,)
        return weight, WeightSpec(
            f"{name}_bias", "shift", (size,), (StoredTensor(f"{stored}.bias", size, interleaved),)
        )
