"""A layer whose memory each token lets fade and adds to, in place of reading all keys before it (Mamba 2, arXiv 2405.21060).

Knows its spec, its weights and the backend. It knows no other layer, no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.mixers.state_space_spec import StateSpaceSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(slots=True)
class StateSpaceWeights:
    """As `StateSpaceSpec.weights` lists them. H heads of D values; C channels: those of H D values, keys and queries."""

    projections: Weight  # [H D + C + H, hidden]: gates; values, keys and queries; steps
    convolution: Tensor  # [C, width] float32
    rate: Tensor  # [H] float32
    step_bias: Tensor  # [H] float32
    skip: Tensor  # [H] float32
    out: Weight  # [hidden, H D]
    norm: Tensor | None = None  # [H D] float32
    projections_bias: Tensor | None = None  # [H D + C + H]
    convolution_bias: Tensor | None = None  # [C] float32
    out_bias: Tensor | None = None  # [hidden]


class StateSpace:
    """Projects, convolves, reads and adds to the memory, gates what was read, norms it by groups, projects back.

    weights: the fields of `StateSpaceWeights`.
    """

    def __init__(self, spec: StateSpaceSpec, weights: Mapping[str, Any], backend: Backend) -> None:
        import torch

        self.spec = spec
        self.weights = StateSpaceWeights(**weights)
        self._backend = backend
        self._ones = torch.ones(sum(spec.projected), dtype=torch.float32, device=backend.device)
        self._factors: Tensor | None = None  # of projected columns
        if spec.factors is not None:
            keys = spec.groups * spec.state_dim
            counts = torch.tensor((spec.values, spec.values, keys, keys, spec.heads))
            self._factors = torch.tensor(spec.factors, dtype=torch.float32).repeat_interleave(counts).to(backend.device)

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. changes: what adapters add. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        projected = backend.linear(x, w.projections, w.projections_bias)
        if lora is not None:
            lora.add("projections", projected, x)
        if self._factors is not None:
            backend.scale_columns(projected, self._factors, self._ones)
        gate, mixed, step = projected.split_with_sizes(spec.projected, 1)
        mixed = backend.short_convolution(mixed, w.convolution, states.window, rows, "silu", w.convolution_bias)
        parts = mixed, step, w.rate, w.step_bias, w.skip
        read = backend.state_space(*parts, states.memory, rows, limits=spec.limits)  # [T, H D]
        if spec.normed == "before the gate":
            read = self._normed(read)
        backend.multiply(read, backend.activation(gate, "silu"))
        if spec.normed == "gated":
            read = self._normed(read)
        out = backend.linear(read, w.out, w.out_bias)
        if lora is not None:
            lora.add("out", out, read)
        return out

    def _normed(self, read: Tensor) -> Tensor:
        """[T, H D], each group of heads for itself."""
        spec, weight, backend = self.spec, self.weights.norm, self._backend
        assert weight is not None
        if spec.groups == 1:
            return backend.rms_norm(read, weight, spec.norm_eps)
        size = spec.values // spec.groups
        normed = backend.rms_norm(read.view(-1, spec.groups, size), self._ones[:size], spec.norm_eps).view(read.shape)
        backend.scale_columns(normed, weight, self._ones[: spec.values])
        return normed
