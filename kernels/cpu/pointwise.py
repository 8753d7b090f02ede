"""What works on each number by itself, of the backend of the compiled kernels."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.cpu import elementwise, ops
from windlass.kernels.cpu.library import Library
from windlass.kernels.operations.pointwise import Pointwise


class CompiledPointwise(Pointwise):
    """See `Pointwise`; by the functions of the library that it holds at the time."""

    _library: Library

    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        return ops.gated_activation(gate_up, activation, library=self._library)

    def activation(self, x: Tensor, activation: str) -> Tensor:
        return elementwise.activate(x, activation, library=self._library)

    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        return elementwise.xielu(x, alpha_p, alpha_n, beta, eps, library=self._library)

    def clamped_glu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        return ops.clamped_glu(gate_up, alpha, limit, library=self._library)

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        ops.gate_by_sigmoid(x, gate, library=self._library)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return ops.soft_cap(x, cap, library=self._library)

    def clip(self, x: Tensor, limit: float) -> None:
        elementwise.clip(x, limit, library=self._library)

    def multiply(self, x: Tensor, by: Tensor) -> None:
        elementwise.multiply(x, by, library=self._library)

    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        elementwise.scale_rows(x, factors, library=self._library)

    def scale_columns(self, x: Tensor, first: Tensor, second: Tensor) -> None:
        elementwise.scale_columns(x, first, second, library=self._library)
