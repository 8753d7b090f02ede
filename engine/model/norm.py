"""The norms of a decoder's stream: what one does, alone or behind an addition. Knows the backend and no layer."""

from __future__ import annotations

from torch import Tensor

from windlass.engine.model.norm_spec import NormForm
from windlass.kernels import Backend


class Norm:
    """weight, bias: [hidden] float32, the weight with its offset applied; no bias where the form has none.

    weight None: there is no norm, what comes in goes out.
    """

    def __init__(
        self, form: NormForm, weight: Tensor | None, bias: Tensor | None, eps: float, backend: Backend
    ) -> None:
        self._form, self._weight, self._bias, self._eps, self._backend = form, weight, bias, eps, backend

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]. Returns the same shape and dtype; x itself where there is no norm."""
        if self._weight is None:
            return x
        if self._form.centered:
            return self._backend.layer_norm(x, self._weight, self._bias, self._eps)
        return self._backend.rms_norm(x, self._weight, self._eps)

    def after_adding(self, residual: Tensor, x: Tensor) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum. Both [T, hidden]."""
        if self._weight is not None and not self._form.centered:
            return self._backend.add_rms_norm(residual, x, self._weight, self._eps)
        self._backend.add(residual, x)
        return self(residual)
