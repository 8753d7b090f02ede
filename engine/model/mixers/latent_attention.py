"""Multi-head latent attention (MLA; DeepSeek V2, 2405.04434): specification, absorbed and expanded forms, and the
layer.

The cache holds one row per token: the rotated part of the key, which all heads share, followed by the latent vector
from which the keys and values of every head are computed.

*Absorbed*: a query is multiplied by the key projection, and the result by the value projection (section 2.1.2), so that
every head's query attends to the one wide cached row. *Expanded*: keys and values of a few heads at a time are computed
from the cached rows, followed by ordinary attention of narrow heads. Expansion costs as much per cached row as
absorption costs per query, so it pays for many queries. Both compute the same sums in another order, rounded only where
prompt attention may round as well.

Torch is imported only where tensors are made, because the API process reads specifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.engine.model.adapted_linear import adapted_linear
from windlass.engine.model.mixers.attention import AttentionKind, AttentionMetadata
from windlass.engine.model.weight_spec import RotaryRows, StoredTensor, WeightSpec, norm_weight, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import AttentionCall, Backend, KVPages, Weight


LATENT_NORM_EPS = 1e-6  # of the norms inside the layer, in every implementation, independent of config.json


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Checkpoint tensor names within the layer.

    q: from the hidden state; q_down, q_up: through a narrower state. kv_up: [heads * (plain + value), latent]; k_up,
    v_up: the same as two tensors [heads, ...].
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
    """One layer. The cache holds one row of rotary_dim + latent_dim numbers per token, for any number of heads.

    A head's key has plain_dim numbers computed from the latent ones, and the rotated ones, which all heads share. Its
    value has value_dim numbers computed from the latent ones.
    """

    num_heads: int
    latent_dim: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    scale: float  # multiplies q·k
    query_rank: int | None = None  # width of the narrower state; None: queries come from the hidden state
    bias: bool = False  # of the projections from and to the hidden state, except of `q`
    interleaved: bool = True  # rotated pairs are stored as (2j, 2j + 1)
    in_parts: bool = False  # k_up [heads, latent_dim, plain_dim] and v_up [heads, value_dim, latent_dim] are stored
    rotary_group: int | None = 0
    kv_group: int = 0
    window: int | None = None
    soft_cap: float | None = None
    names: LatentNames = field(default_factory=LatentNames)

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(self.kv_group, self.scale, self.window, self.soft_cap, self.rotary_group is not None)

    @property
    def cached_dim(self) -> int:
        """Width of a token's row in the cache: rotated dims, then latent ones."""
        return self.rotary_dim + self.latent_dim

    def weights(self, hidden_size: int) -> tuple[WeightSpec, ...]:
        """The fields of `LatentWeights`. Rotated rows of a head come first here, last in checkpoints."""
        names, head = self.names, self.plain_dim + self.rotary_dim
        heads = RotaryRows(
            self.num_heads, head, self.rotary_dim, "interleaved" if self.interleaved else "halves", last=True
        )
        shared = replace(heads, heads=1, head_dim=self.cached_dim)
        rows, rank = self.num_heads * head, self.query_rank
        result: tuple[WeightSpec, ...] = ()
        if rank is None:
            result += projection("q", [StoredTensor(names.q, rows, role="q", rotary=heads)], hidden_size, bias=False)
        else:
            down = [StoredTensor(names.q_down, rank, role="q")]
            result += projection("q_down", down, hidden_size, bias=self.bias)
            result += (norm_weight("q_norm", names.q_norm, rank),)
            result += projection("q", [StoredTensor(names.q_up, rows, role="q", rotary=heads)], rank, bias=False)
        kv = [StoredTensor(names.kv_down, self.cached_dim, role="v", rotary=shared)]
        result += projection("kv", kv, hidden_size, bias=self.bias)
        result += (norm_weight("kv_norm", names.kv_norm, self.latent_dim),)
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


_MIN_EXPANDED_TOKENS = 64  # new tokens; for fewer, packing narrow heads takes longer than multiplying wide ones
_MAX_EXPANDED_ROWS = 1 << 16  # cached rows; their float32 copy and one head's keys and values need about 200 MB
_MAX_EXPANDED_BYTES = 16 << 20  # of keys and values at a time, unless one head's need more


class QueryRotations(NamedTuple):
    """Rotated query copies: the query of each, int64 [V], and cos and sin [V, R / 2] of its rotation."""

    sources: Tensor
    cos: Tensor
    sin: Tensor


class LatentQueries(NamedTuple):
    """Queries [T, H, R + N], rotated, and the copies of them that the call's ranges refer to."""

    q: Tensor
    rotations: QueryRotations | None = None

    def of(self, tokens: Tensor, call: AttentionCall) -> tuple[LatentQueries, AttentionCall]:
        """Queries of some tokens, in rising order, and their call (from `AttentionCall.select_sequences`) with row
        numbers among them."""
        if call.ranges is None:
            return LatentQueries(self.q[tokens], None), call
        import torch

        count, total = tokens.shape[0], self.q.shape[0]
        new_rows = torch.full((total,), -1, dtype=torch.int64, device=tokens.device)  # by old row
        new_rows[tokens] = torch.arange(count, device=tokens.device)
        rotations = None
        if self.rotations is not None:
            sources, cos, sin = self.rotations
            sources = new_rows[sources]
            selected = (sources >= 0).nonzero().squeeze(1)
            new_copies = torch.full_like(sources, -1)
            new_copies[selected] = torch.arange(count, count + selected.shape[0], device=tokens.device)
            new_rows = torch.cat((new_rows, new_copies))
            if selected.shape[0]:
                rotations = QueryRotations(sources[selected], cos[selected], sin[selected])
        rows = call.ranges.rows
        rows = torch.where(rows < 0, rows, new_rows[rows.clamp(min=0)])
        return LatentQueries(self.q[tokens], rotations), replace(call, ranges=replace(call.ranges, rows=rows))


class LatentAttentionForms:
    """Absorbed and expanded form of one layer."""

    def __init__(self, spec: LatentSpec, up: Tensor, backend: Backend) -> None:
        """up: [H, N + V, C], for each head the key projection, then the value projection, of a latent vector."""
        self._spec, self._up, self._backend = spec, up, backend

    def attend(self, queries: LatentQueries, pages: KVPages, call: AttentionCall) -> Tensor:
        """Attention output of all heads, [T, H * V]."""
        expanded = self._expanded_sequences(pages, call)
        if not expanded:
            return self._absorbed(queries, pages, call)
        import torch

        spec, q = self._spec, queries.q
        out = q.new_empty(q.shape[0], spec.num_heads * spec.value_dim)
        others = [b for b in range(call.batch_size) if b not in expanded]
        forms = [(self._absorbed, others)] if others else []
        for form, sequences in forms + [(self._expanded, [b]) for b in expanded]:
            tokens, theirs = call.select_sequences(torch.tensor(sequences))
            part, own = queries.of(tokens, theirs)
            out[tokens] = form(part, pages, own)
        return out

    def _expanded_sequences(self, pages: KVPages, call: AttentionCall) -> list[int]:
        """Sequences for which the expanded form needs fewer multiplications."""
        expansion, spec = self._backend.latent_expansion(pages), self._spec
        if expansion is None or call.is_decode:
            return []
        import torch

        # Multiplications per head: of the projections, per cached row or per query; saved for each pair of query and key.
        projected = (spec.plain_dim + spec.value_dim) * spec.latent_dim
        saved = 2 * spec.cached_dim - (spec.rotary_dim + spec.plain_dim + spec.value_dim)
        sequences = []
        for b, count in enumerate(call.query_start.diff().tolist()):
            if count < _MIN_EXPANDED_TOKENS:
                continue
            keys = sum(end - begin for begin, end in _visible_ranges(call.select_sequences(torch.tensor([b]))[1]))
            pairs = count * keys - count * (count - 1) // 2
            spent = projected * (keys * expansion.row_cost - count * expansion.query_cost)
            if keys <= _MAX_EXPANDED_ROWS and spent < pairs * saved:
                sequences.append(b)
        return sequences

    def _absorbed(self, queries: LatentQueries, pages: KVPages, call: AttentionCall) -> Tensor:
        spec, backend, up, rotations = self._spec, self._backend, self._up, queries.rotations
        q = backend.latent_queries(queries.q, up, spec.rotary_dim)  # [T, H, R + C]
        if rotations is not None:
            q = backend.rotate_queries(q, *rotations)
        attended = backend.paged_attention(q, pages.with_keys_as_values, call)  # [T, H, R + C]
        return backend.latent_values(attended[:, :, spec.rotary_dim :], up, spec.value_dim)

    def _expanded(self, queries: LatentQueries, pages: KVPages, call: AttentionCall) -> Tensor:
        """For a call of one sequence."""
        import torch

        spec, backend, q = self._spec, self._backend, queries.q
        expansion = backend.latent_expansion(pages)
        dtype = torch.float32 if expansion is None else expansion.dtype
        if queries.rotations is not None:
            q = backend.rotate_queries(q, *queries.rotations)
        size, table = pages.block_size, call.block_tables[0]
        visible = sorted(
            {block for begin, end in _visible_ranges(call) for block in range(begin // size, -(-end // size))}
        )
        blocks = torch.tensor(visible, device=table.device)
        new_table = torch.full_like(table, -1)
        new_table[blocks] = torch.arange(len(visible), dtype=table.dtype, device=table.device)
        call = replace(call, block_tables=new_table[None])
        rows = pages.keys_of(table[blocks].long(), spec.cached_dim).to(dtype)  # [M, P, 1, R + C]
        width = spec.rotary_dim + spec.plain_dim + spec.value_dim  # of a head and a cached row
        step = max(1, _MAX_EXPANDED_BYTES // (dtype.itemsize * len(visible) * size * width))
        parts = []
        for head in range(0, spec.num_heads, step):
            own = self._up[head : head + step]
            expanded = expand_latents(rows, own, spec.rotary_dim, spec.value_dim)
            parts.append(backend.paged_attention(q[:, head : head + step], expanded, call))
        return torch.cat(parts, dim=1).flatten(1)


def expand_latents(rows: Tensor, up: Tensor, rotary_dim: int, value_dim: int) -> KVPages:
    """Keys and values of some heads from latent vectors, as unquantized pages.

    rows: [M, P, 1, R + C] float32 or bfloat16, of M blocks. up: [H, N + V, C], of these heads. Returns pages of M
    blocks in the dtype of `rows`: keys [M, P, H, R + N], whose first R dims are copied, and values [M, P, H, V].
    """
    import torch

    from windlass.kernels import KVPages

    blocks, size, heads, plain = *rows.shape[:2], up.shape[0], up.shape[1] - value_dim
    flat, wide = rows.view(blocks * size, -1), up.to(rows.dtype)
    keys = rows.new_empty(blocks * size, heads, rotary_dim + plain)
    values = rows.new_empty(blocks * size, heads, value_dim)
    keys[:, :, :rotary_dim] = flat[:, None, :rotary_dim]
    latents = flat[:, rotary_dim:]  # [S, C]
    if rows.dtype != torch.float32:  # one product of all heads, and a copy of its result
        products = torch.mm(latents, wide.flatten(0, 1).t()).view(blocks * size, heads, -1)
        keys[:, :, rotary_dim:], values[:] = products[:, :, :plain], products[:, :, plain:]
    else:  # products of single heads can be written directly to the pages
        for head, own in enumerate(wide):
            torch.mm(latents, own[:plain].t(), out=keys[:, head, rotary_dim:])
            torch.mm(latents, own[plain:].t(), out=values[:, head])
    return KVPages(keys.view(blocks, size, heads, -1), values.view(blocks, size, heads, -1))


def _visible_ranges(call: AttentionCall) -> list[tuple[int, int]]:
    """Keys [begin, end) that the queries of a call of one sequence attend to."""
    if call.has_ranges:
        return [(part.begin, part.end) for part in call.key_ranges()]
    import torch

    length = int(call.seq_lens[0])
    first, end = call.visible(torch.tensor([length - call.num_tokens, length - 1]), length)
    return [(int(first[0]), int(end[1]))]


@dataclass(slots=True)
class LatentWeights:
    """Weights listed by `LatentSpec.weights`. R rotated, N plain, V value and C latent dims. Norm weights are float32.

    A head's rows of q are its rotated dims, then its plain ones; the rows of kv are the rotated dims, then the latent
    ones.
    """

    q: Weight  # [H * (R + N), hidden], or [H * (R + N), rank]
    kv: Weight  # [R + C, hidden]
    kv_norm: Tensor  # [C]
    kv_up: Tensor  # [H * (N + V), C]: for each head the key projection, then the value projection
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
        """x: [T, hidden], normed. Returns [T, hidden]."""
        spec, w, backend = self.spec, self.weights, self._backend
        group = spec.rotary_group or 0
        heads, rotated = spec.num_heads, spec.rotary_dim
        narrow = x
        if w.q_down is not None and w.q_norm is not None:
            narrow = adapted_linear(backend, "q_down", x, w.q_down, w.q_down_bias, lora)
            narrow = backend.rms_norm(narrow, w.q_norm, LATENT_NORM_EPS)
        q = adapted_linear(backend, "q", narrow, w.q, lora=lora).view(x.shape[0], heads, -1)  # [T, H, R + N]
        k = adapted_linear(backend, "kv", x, w.kv, w.kv_bias, lora)  # [T, R + C]
        backend.rms_norm_in_place(k[:, rotated:], w.kv_norm, LATENT_NORM_EPS)
        k = k.view(x.shape[0], 1, -1)
        backend.rotate_and_append(q, k, k[:, :, :0], *metadata.rotations[group], pages, metadata.slots[spec.kv_group])
        metadata.append_key_copies(spec.rotary_group, spec.kv_group, q[:, :0], k, k[:, :, :0], pages, backend)
        rotations = None
        if metadata.copy_sources is not None:
            rotations = QueryRotations(metadata.copy_sources, *metadata.copy_rotations[group])
        values = self._forms.attend(LatentQueries(q, rotations), pages, metadata.calls[self._kind])  # [T, H * V]
        return adapted_linear(backend, "out", values, w.out, w.out_bias, lora)
