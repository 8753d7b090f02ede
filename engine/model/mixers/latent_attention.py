"""Multi-head latent attention (MLA; DeepSeek V2, 2405.04434): specification, absorbed and expanded forms, and the layer.

The cache holds one row per token: the rotated part of the key, which all heads share, followed by the latent vector from which
keys and values of every head are made.

*Absorbed*: a query is multiplied by the key projection, and the result by the value projection (section 2.1.2), so that every
head's query attends to the one wide cached row. *Expanded*: keys and values of every head are made from the cached rows, a few heads
at a time, followed by ordinary attention of narrow heads. Expansion costs as much per cached row as absorption costs per query, so it
pays for many queries. Both compute the same sums in another order, rounded only where prompt attention may round as well.
Torch is imported only where tensors are made, because the API process reads specifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.engine.model.mixers.attention import AttentionKind, AttentionMetadata
from windlass.engine.model.weight_spec import RotaryLast, StoredTensor, WeightSpec, norm, projection

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.engine.model.lora import LayerLoRA
    from windlass.kernels import AttentionCall, Backend, KVPages, Weight


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


_MIN_EXPANDED_TOKENS = 64  # new tokens; for fewer, packing narrow heads takes longer than multiplying wide ones

_MAX_EXPANDED_ROWS = 1 << 16  # cached rows, whose float32 copy and one head's keys and values are some 200 MB

_MAX_EXPANDED_BYTES = 16 << 20  # of keys and values that are there at a time, if one head's are not more


class QueryRotations(NamedTuple):
    """Further versions of queries: of which query each is, int64 [V], and cosines and sines [V, R / 2] of its turn."""

    sources: Tensor
    cos: Tensor
    sin: Tensor


class LatentQueries(NamedTuple):
    """Queries [T, H, R + N], rotated, as heads have them, and what versions of them the call's ranges name."""

    q: Tensor
    rotations: QueryRotations | None = None

    def of(self, tokens: Tensor, call: AttentionCall) -> tuple[LatentQueries, AttentionCall]:
        """Those of some tokens, rising, and the call that is theirs alone (`AttentionCall.select_sequences`), naming their rows."""
        if call.ranges is None:
            return LatentQueries(self.q[tokens], None), call
        import torch

        count, total = tokens.shape[0], self.q.shape[0]
        place = torch.full((total,), -1, dtype=torch.int64, device=tokens.device)  # of each token among these
        place[tokens] = torch.arange(count, device=tokens.device)
        rotations, rows = None, place
        if self.rotations is not None:
            kept = (place[self.rotations.sources] >= 0).nonzero().squeeze(1)
            turned = torch.full_like(self.rotations.sources, -1)
            turned[kept] = torch.arange(count, count + kept.shape[0], device=tokens.device)
            rows = torch.cat((place, turned))
            if kept.shape[0]:
                rotations = QueryRotations(
                    place[self.rotations.sources[kept]], self.rotations.cos[kept], self.rotations.sin[kept]
                )
        before = call.ranges.rows
        named = torch.where(before < 0, before, rows[before.clamp(min=0)])
        return LatentQueries(self.q[tokens], rotations), replace(call, ranges=replace(call.ranges, rows=named))


class LatentAttentionForms:
    """Of one layer. up: [H, N + V, C], of each head what makes its keys of a latent vector, then what makes its values."""

    def __init__(self, spec: LatentSpec, up: Tensor, backend: Backend) -> None:
        self._spec, self._up, self._backend = spec, up, backend

    def attend(self, queries: LatentQueries, pages: KVPages, call: AttentionCall) -> Tensor:
        """What every head sees, made into its values: [T, H * V]."""
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
        """The sequences whose new tokens take the expanded form, because it multiplies less."""
        expansion, spec = self._backend.latent_expansion(pages), self._spec
        if expansion is None or call.is_decode:
            return []
        import torch

        made = (spec.plain_dim + spec.value_dim) * spec.latent_dim  # products of a cached row here, of a query there
        saved = 2 * spec.cached_dim - (spec.rotary_dim + spec.plain_dim + spec.value_dim)  # of a query and a key
        found = []
        for b, count in enumerate(call.query_start.diff().tolist()):
            if count < _MIN_EXPANDED_TOKENS:
                continue
            keys = sum(end - begin for begin, end in _visible_ranges(call.select_sequences(torch.tensor([b]))[1]))
            pairs = count * keys - count * (count - 1) // 2
            spent = made * (keys * expansion.row_cost - count * expansion.query_cost)
            if keys <= _MAX_EXPANDED_ROWS and spent < pairs * saved:
                found.append(b)
        return found

    def _absorbed(self, queries: LatentQueries, pages: KVPages, call: AttentionCall) -> Tensor:
        spec, backend, up, rotations = self._spec, self._backend, self._up, queries.rotations
        q = backend.latent_queries(queries.q, up, spec.rotary_dim)  # [T, H, R + C]
        if rotations is not None:
            q = backend.rotate_queries(q, *rotations)
        attended = backend.paged_attention(q, pages.with_keys_as_values, call)  # [T, H, R + C]
        return backend.latent_values(attended[:, :, spec.rotary_dim :], up, spec.value_dim)

    def _expanded(self, queries: LatentQueries, pages: KVPages, call: AttentionCall) -> Tensor:
        """Of a call of one sequence."""
        import torch

        spec, backend, q = self._spec, self._backend, queries.q
        expansion = backend.latent_expansion(pages)
        dtype = torch.float32 if expansion is None else expansion.dtype
        if queries.rotations is not None:
            q = backend.rotate_queries(q, *queries.rotations)
        size, table = pages.block_size, call.block_tables[0]
        seen = sorted(
            {block for begin, end in _visible_ranges(call) for block in range(begin // size, -(-end // size))}
        )
        blocks = torch.tensor(seen, device=table.device)
        places = torch.full_like(table, -1)
        places[blocks] = torch.arange(len(seen), dtype=table.dtype, device=table.device)
        call = replace(call, block_tables=places[None])
        rows = pages.keys_of(table[blocks].long(), spec.cached_dim).to(dtype)  # [M, P, 1, R + C]
        numbers = spec.rotary_dim + spec.plain_dim + spec.value_dim  # of a head and a cached row
        step = max(1, _MAX_EXPANDED_BYTES // (dtype.itemsize * len(seen) * size * numbers))
        parts = []
        for head in range(0, spec.num_heads, step):
            own = self._up[head : head + step]
            expanded = expand_latents(rows, own, spec.rotary_dim, spec.value_dim)
            parts.append(backend.paged_attention(q[:, head : head + step], expanded, call))
        return torch.cat(parts, dim=1).flatten(1)


def expand_latents(rows: Tensor, up: Tensor, rotary_dim: int, value_dim: int) -> KVPages:
    """The keys and values that heads make of latent vectors, as pages of floats.

    rows: [M, P, 1, R + C] float32 or bfloat16, of M blocks. up: [H, N + V, C], of the heads that are asked for. Returns pages
    of M blocks in the rows' type: keys [M, P, H, R + N], the first R dims as they are, and values [M, P, H, V].
    """
    import torch

    from windlass.kernels import KVPages

    blocks, size, heads, plain = *rows.shape[:2], up.shape[0], up.shape[1] - value_dim
    flat, wide = rows.view(blocks * size, -1), up.to(rows.dtype)
    keys = rows.new_empty(blocks * size, heads, rotary_dim + plain)
    values = rows.new_empty(blocks * size, heads, value_dim)
    keys[:, :, :rotary_dim] = flat[:, None, :rotary_dim]
    latents = flat[:, rotary_dim:]  # [S, C]
    if rows.dtype != torch.float32:  # its products are over before places for their results are found
        made = torch.mm(latents, wide.flatten(0, 1).t()).view(blocks * size, heads, -1)
        keys[:, :, rotary_dim:], values[:] = made[:, :, :plain], made[:, :, plain:]
        return KVPages(keys.view(blocks, size, heads, -1), values.view(blocks, size, heads, -1))
    for head, own in enumerate(wide):  # a product writes where its result belongs, which one of all heads could not
        torch.mm(latents, own[:plain].t(), out=keys[:, head, rotary_dim:])
        torch.mm(latents, own[plain:].t(), out=values[:, head])
    return KVPages(keys.view(blocks, size, heads, -1), values.view(blocks, size, heads, -1))


def _visible_ranges(call: AttentionCall) -> list[tuple[int, int]]:
    """The keys [begin, end) that the queries of a call of one sequence see."""
    if call.has_ranges:
        return [(part.begin, part.end) for part in call.key_ranges()]
    import torch

    length = int(call.seq_lens[0])
    first, end = call.visible(torch.tensor([length - call.num_tokens, length - 1]), length)
    return [(int(first[0]), int(end[1]))]


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
