"""The description of an attention layer: shapes, switches, and its weights with their names in checkpoints.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from windlass.engine.model.weight_spec import InterleavedHeads, StoredTensor, WeightSpec, norm, projection


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Of a checkpoint's tensors, within their layer. qkv: where q, k and v are stored as one.

    qkv_by_head: one head after the other, each with its q, k and v.
    """

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    qkv_by_head: bool = False
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer. scale multiplies q·k; window: keys a query sees, itself included; soft_cap: see kernels.

    rotary_group and kv_group index into the model's groups; rotary_group None: the layer does not rotate (NoPE).
    qk_norm: RMS norm per head, before or after the rotation; "all heads": one over all of them, before it.
    interleaved_dims: how many dims of each head the checkpoint holds as pairs (2j, 2j + 1);
    0: its pairs are (j, j + d/2) already.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary_group: int | None = 0
    kv_group: int = 0
    window: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["before", "after", "all heads"] | None = None
    interleaved_dims: int = 0
    names: AttentionNames = AttentionNames()

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `AttentionWeights`: projections fused, so that each input is read once."""
        names, heads, kv_heads = self.names, self.num_heads, self.num_kv_heads
        q_size, kv_size = heads * self.head_dim, kv_heads * self.head_dim
        if names.qkv is not None:
            threes = (heads, self.head_dim) if names.qkv_by_head else None
            qkv = [StoredTensor(names.qkv, q_size + 2 * kv_size, self._interleaved(heads + kv_heads), threes, "q k v")]
        else:
            qkv = [
                StoredTensor(names.q, q_size, self._interleaved(heads), role="q"),
                StoredTensor(names.k, kv_size, self._interleaved(kv_heads), role="k"),
                StoredTensor(names.v, kv_size, role="v"),
            ]
        result = projection("qkv", qkv, hidden_size, bias=self.qkv_bias)
        result += projection("out", [StoredTensor(names.out, hidden_size, role="out")], q_size, bias=self.out_bias)
        if self.qk_norm is not None:
            # A norm's weights apply to rotated dims as the checkpoint numbers them.
            pairs = self._interleaved(1)
            over_all = self.qk_norm == "all heads"
            result += (
                norm("q_norm", names.q_norm, q_size if over_all else self.head_dim, pairs),
                norm("k_norm", names.k_norm, kv_size if over_all else self.head_dim, pairs),
            )
        return result

    def _interleaved(self, heads: int) -> InterleavedHeads | None:
        return InterleavedHeads(heads, self.head_dim, self.interleaved_dims) if self.interleaved_dims else None


def windows_of(specs: Sequence[AttentionSpec]) -> tuple[int | None, ...]:
    """The kinds of windows that these layers have, each once; None for layers without."""
    return tuple(dict.fromkeys(spec.window for spec in specs))
