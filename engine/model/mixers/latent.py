"""Multi-head latent attention: what one layer does. Knows its spec, its weights and the backend, and nothing else.

The cache holds of each token one row: the rotated part of the key, which all heads share, and behind it the latent vector
that keys and values of every head are made of (arXiv 2405.04434). Whether they are made, `latent_forms` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.engine.model.mixers.attention import AttentionMetadata
from windlass.engine.model.mixers.latent_forms import LatentAttentionForms, LatentQueries, QueryRotations
from windlass.engine.model.mixers.latent_spec import LATENT_NORM_EPS, LatentSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.adapters.adapter import LayerLoRA
    from windlass.kernels import Backend, KVPages, Weight


@dataclass(slots=True)
class LatentWeights:
    """As `LatentSpec.weights` lists them. R rotated, N plain, V value and C latent dims. Norm weights are float32.

    A head's rows of q are its rotated dims, then its plain ones; the rows of kv are the rotated dims, then the latent ones.
    """

    q: Weight  # [H * (R + N), hidden], or [H * (R + N), rank]
    kv: Weight  # [R + C, hidden]
    kv_norm: Tensor  # [C]
    kv_up: Tensor  # [H * (N + V), C]: of each head what makes its keys, then what makes its values
    out: Weight  # [hidden, H * V]
    q_down: Weight | None = None  # [rank, hidden]
    q_norm: Tensor | None = None  # [rank]
    q_down_bias: Tensor | None = None
    kv_bias: Tensor | None = None
    out_bias: Tensor | None = None


class LatentAttention:
    """weights: the fields of `LatentWeights`. kind: of this layer, see `AttentionMetadataBuilder`."""

    def __init__(self, spec: LatentSpec, weights: Mapping[str, Any], kind: int, backend: Backend) -> None:
        self.spec = spec
        self.weights = LatentWeights(**weights)
        self._backend, self._kind = backend, kind
        up = self.weights.kv_up.view(spec.num_heads, spec.plain_dim + spec.value_dim, spec.latent_dim)
        self._forms = LatentAttentionForms(spec, up, backend)

    def forward(self, x: Tensor, metadata: AttentionMetadata, pages: KVPages, lora: LayerLoRA | None = None) -> Tensor:
        """x: [T, hidden], normed. changes: what adapters add. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        group = spec.rotary_group or 0
        heads, rotated = spec.num_heads, spec.rotary_dim
        narrow = x
        if w.q_down is not None and w.q_norm is not None:
            narrow = self._project("q_down", x, w.q_down, w.q_down_bias, lora)
            narrow = backend.rms_norm(narrow, w.q_norm, LATENT_NORM_EPS)
        q = self._project("q", narrow, w.q, None, lora).view(x.shape[0], heads, -1)  # [T, H, R + N]
        k = self._project("kv", x, w.kv, w.kv_bias, lora)  # [T, R + C]
        backend.rms_norm_in_place(k[:, rotated:], w.kv_norm, LATENT_NORM_EPS)
        k = k.view(x.shape[0], 1, -1)
        backend.rotate_and_append(q, k, k[:, :, :0], *metadata.rotations[group], pages, metadata.slots[spec.kv_group])
        metadata.append_key_copies(spec.rotary_group, spec.kv_group, q[:, :0], k, k[:, :, :0], pages, backend)
        copy_rotations = (
            None if metadata.sources is None else QueryRotations(metadata.sources, *metadata.copy_rotations[group])
        )
        values = self._forms.attend(LatentQueries(q, copy_rotations), pages, metadata.calls[self._kind])  # [T, H * V]
        return self._project("out", values, w.out, w.out_bias, lora)

    def _project(self, name: str, x: Tensor, weight: Weight, bias: Tensor | None, lora: LayerLoRA | None) -> Tensor:
        out = self._backend.linear(x, weight, bias)
        if lora is not None:
            lora.add(name, out, x)
        return out
