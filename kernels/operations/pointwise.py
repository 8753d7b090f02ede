"""What a backend offers that works on each number by itself: activations, gates, limits, factors. T tokens of one step."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Pointwise(ABC):
    """See the module."""

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of [T, 2F] holding (gate, up). Returns [T, F]. activation: "silu", "gelu_tanh", "gelu" (by the
        error function) or "relu2" (the square of what is positive)."""

    @abstractmethod
    def activation(self, x: Tensor, activation: str) -> Tensor:
        """activation(x) of [T, F], one of those that `gated_activation` has."""

    @abstractmethod
    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        """xIELU (2411.13010) of [T, F]: with a = softplus(alpha_p) and c = beta + softplus(alpha_n), a x^2 + beta x where x is
        positive, and c (e^min(x, eps) - 1 - x) + beta x elsewhere. The four are float32 [1]; eps is a little below 0."""

    @abstractmethod
    def clamped_glu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1) of [T, 2F] holding (gate, up), both limited to `limit`, up from below too.
        Returns [T, F]."""

    @abstractmethod
    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        """x times sigmoid(gate), in place. x: [T, N]. gate: [T, N], or [T, 1] for a whole row; of x's dtype or float32."""

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of [T, N] float32."""

    @abstractmethod
    def clip(self, x: Tensor, limit: float) -> None:
        """Bring every number of x [T, N] into -limit … limit, in place."""

    @abstractmethod
    def multiply(self, x: Tensor, by: Tensor) -> None:
        """x times `by`, in place, in float32. x: [T, N]. by: [T, N] of x's dtype, or one factor, [1] float32; any row strides."""

    @abstractmethod
    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        """x times the factor of its row, in place. x: [T, N]. factors: [T] float32, contiguous."""

    @abstractmethod
    def scale_columns(self, x: Tensor, first: Tensor, second: Tensor) -> None:
        """x times both factors of its column, in place. x: [T, N]. first, second: [N] float32, contiguous."""
