"""A layer that carries a state from token to token, in place of reading all keys before it (Gated DeltaNet, arXiv 2412.06464).

Knows its spec, its weights and the backend. It knows no other layer, no checkpoint and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.mixers.delta_spec import GatedDeltaNetSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, StatePages, StateRows, Weight


@dataclass(slots=True)
class GatedDeltaNetWeights:
    """As `GatedDeltaNetSpec.weights` lists them. Hk heads of keys of D numbers, H of values of V; C = 2 Hk D + H V channels."""

    projections: Weight  # [C + H V + 2 H, hidden]: queries, keys and values, gates, strengths, decays
    convolution: Tensor  # [C, width] float32
    rate: Tensor  # [H] float32
    decay_bias: Tensor  # [H] float32
    norm: Tensor  # [V] float32
    out: Weight  # [hidden, H V]


class GatedDeltaNet:
    """Projects, convolves, reads and corrects the memory, norms what each head read, gates it, projects back.

    weights: the fields of `GatedDeltaNetWeights`.
    """

    def __init__(self, spec: GatedDeltaNetSpec, weights: Mapping[str, Any], norm_eps: float, backend: Backend) -> None:
        self.spec = spec
        self.weights = GatedDeltaNetWeights(**weights)
        self._norm_eps, self._backend = norm_eps, backend

    def forward(self, x: Tensor, rows: StateRows, states: StatePages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. states: of this layer, changed in place. changes: what adapters add. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        projected = backend.linear(x, w.projections)
        lora = None if spec.tiled_heads else lora
        if lora is not None:
            lora.add("projections", projected, x)
        qkv, gate, strength, decay = projected.split_with_sizes(spec.projected, 1)
        qkv = backend.short_convolution(qkv, w.convolution, states.window, rows, "silu")
        gates = decay, strength, w.rate, w.decay_bias
        read = backend.gated_delta_rule(qkv, *gates, states.memory, rows, tiled_heads=spec.tiled_heads)  # [T, H V]
        normed = backend.rms_norm(read.view(-1, spec.heads, spec.value_dim), w.norm, self._norm_eps).view(read.shape)
        backend.multiply(normed, backend.activation(gate, "silu"))
        out = backend.linear(normed, w.out)
        if lora is not None:
            lora.add("out", out, normed)
        return out
