"""The description of a layer of multi-head latent attention (DeepSeek V2, arXiv 2405.04434): shapes, switches, weights.

Imports no torch: the API process reads specs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.engine.model.mixers.attention_spec import AttentionKind
from windlass.engine.model.weight_spec import RotaryLast, StoredTensor, WeightSpec, norm, projection

LATENT_NORM_EPS = 1e-6  # of the norms inside of it, in every implementation, whatever config.json says of the others


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Of a checkpoint's tensors, within their layer. q: from the hidden state; q_down and q_up: by way of a narrower one.

    k_up, v_up: where what makes keys and what makes values of the heads are two tensors, [heads, ...] each.
    """

    q: str = "self_attn.q_proj"
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"
    k_up: str = "self_attn.k_b_proj"
    v_up: str = "self_attn.v_b_proj"
    out: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One layer. What is cached of a token is one row of rotary_dim + latent_dim numbers, whatever the number of heads.

    A head's key is plain_dim numbers made of the latent ones, and the rotated ones, which all heads share; its value is
    value_dim numbers made of the latent ones. scale multiplies q·k. query_rank: width of the narrower state that queries are
    made of, None where they are made of the hidden state. bias: of the projections from and to the hidden state, that of whole
    queries aside. interleaved: the checkpoint holds rotated pairs as (2j, 2j + 1).
    in_parts: what makes keys [heads, latent_dim, plain_dim] and values [heads, value_dim, latent_dim] are two tensors there.
    """

    num_heads: int
    latent_dim: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    scale: float
    query_rank: int | None = None
    bias: bool = False
    interleaved: bool = True
    in_parts: bool = False
    rotary_group: int | None = 0
    kv_group: int = 0
    window: int | None = None
    soft_cap: float | None = None
    names: LatentNames = field(default_factory=LatentNames)

    @property
    def kind(self) -> AttentionKind:
        """The part of this layer that its attention call depends on."""
        return AttentionKind(self.kv_group, self.scale, self.window, self.soft_cap, self.rotary_group is not None)

    @property
    def cached_dim(self) -> int:
        """The width of a token's row in the cache: rotated dims, then latent ones."""
        return self.rotary_dim + self.latent_dim

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `LatentWeights`. Rotated rows of a head come first here, last in checkpoints."""
        names, head = self.names, self.plain_dim + self.rotary_dim
        heads = RotaryLast(self.num_heads, head, self.rotary_dim, self.interleaved)
        shared = RotaryLast(1, self.cached_dim, self.rotary_dim, self.interleaved)
        rows, rank = self.num_heads * head, self.query_rank
        result: tuple[WeightSpec, ...] = ()
        if rank is None:
            result += projection(
                "q", [StoredTensor(names.q, rows, role="q", rotary_last=heads)], hidden_size, bias=False
            )
        else:
            down = [StoredTensor(names.q_down, rank, role="q")]
            result += projection("q_down", down, hidden_size, bias=self.bias)
            result += (norm("q_norm", names.q_norm, rank),)
            result += projection("q", [StoredTensor(names.q_up, rows, role="q", rotary_last=heads)], rank, bias=False)
        kv = [StoredTensor(names.kv_down, self.cached_dim, role="v", rotary_last=shared)]
        result += projection("kv", kv, hidden_size, bias=self.bias)
        result += (norm("kv_norm", names.kv_norm, self.latent_dim),)
        up_rows = self.num_heads * (self.plain_dim + self.value_dim)
        up = [StoredTensor(f"{names.kv_up}.weight", up_rows)]
        if self.in_parts:
            up = [
                part
                for head in range(self.num_heads)
                for part in (
                    StoredTensor(f"{names.k_up}[{head}].weight", self.plain_dim, transposed=True),
                    StoredTensor(f"{names.v_up}[{head}].weight", self.value_dim),
                )
            ]
        result += (WeightSpec("kv_up", "heads", (up_rows, self.latent_dim), tuple(up)),)
        out = [StoredTensor(names.out, hidden_size, role="out")]
        return result + projection("out", out, self.num_heads * self.value_dim, bias=self.bias)
