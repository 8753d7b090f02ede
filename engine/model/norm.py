"""Norms of a decoder: specification with weight names, and the layers that apply them, alone or fused with an addition.

Torch is imported only where a layer is built, because the API process reads specifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from windlass.engine.model.weight_spec import RotaryRows, StoredTensor, WeightSpec, norm_weight

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import Backend


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm: RMS norm (1910.07467), or LayerNorm (1607.06450), which subtracts the mean first."""

    centered: bool = False  # LayerNorm
    bias: bool = False
    weight: bool = True  # whether the result is multiplied by a weight

    def weights(self, name: str, stored: str, size: int, rotary: RotaryRows | None = None) -> tuple[WeightSpec, ...]:
        """The weight `name` and the bias "<name>_bias". stored: tensor name without ".weight" or ".bias"."""
        if not self.weight:
            return ()
        weight = norm_weight(name, stored, size, rotary)
        if not self.bias:
            return (weight,)
        return weight, WeightSpec(f"{name}_bias", "shift", (size,), (StoredTensor(f"{stored}.bias", size, rotary),))


LAYER_NORM = NormSpec(centered=True, bias=True)


class Norm:
    """A norm on a backend; without a weight, the identity."""

    def __init__(
        self, form: NormSpec, weight: Tensor | None, bias: Tensor | None, eps: float, backend: Backend
    ) -> None:
        """weight: [D] float32, with its offset applied; None: no norm. bias: [D] float32."""
        self._form, self._weight, self._bias, self._eps, self._backend = form, weight, bias, eps, backend

    @classmethod
    def from_weights(
        cls, form: NormSpec, weights: Mapping[str, Any], name: str, size: int, eps: float, backend: Backend
    ) -> Norm:
        """The norm over `size` elements with the weights `name` and "<name>_bias"; ones if the form has no weight."""
        import torch

        weight = weights[name] if form.weight else torch.ones(size, dtype=torch.float32, device=backend.device)
        return cls(form, weight, weights.get(f"{name}_bias"), eps, backend)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, D] or [T, H, D]. Returns the same shape and dtype; x itself if there is no norm."""
        if self._weight is None:
            return x
        if self._form.centered:
            return self._backend.layer_norm(x, self._weight, self._bias, self._eps)
        return self._backend.rms_norm(x, self._weight, self._eps)

    def add_and_norm(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum. Both [T, hidden]."""
        if self._weight is not None and not self._form.centered:
            return self._backend.add_rms_norm(residual, x, self._weight, self._eps)
        self._backend.add(residual, x)
        return self(residual)


class PerHeadNorm:
    """A norm with separate weights for each head and no bias. weight: [H * D] float32."""

    def __init__(self, form: NormSpec, weight: Tensor, heads: int, eps: float, backend: Backend) -> None:
        size = weight.shape[0] // heads
        self._norm = Norm.from_weights(replace(form, weight=False, bias=False), {}, "", size, eps, backend)
        self._weight = weight.view(heads, size)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H, D]. Returns the same shape and dtype."""
        return self._norm(x).mul_(self._weight)
