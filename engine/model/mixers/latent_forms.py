"""The two forms of attention over cached latent vectors, and which one the new tokens of a sequence take.

*Absorbed*: a query is multiplied by what would make the keys, and what it brings back by what would make the values (arXiv
2405.04434, section 2.1.2). So every head's query meets the one cached row, which is wide, and nothing is made of the cache.
*Expanded*: keys and values of every head are made of the cached rows, a few heads at a time, and attention over them is the
ordinary one, of narrow heads. That costs as much for every cached row as the other form costs for every query, so it pays for
many queries. Both are the same sums in another order, rounded only where attention of prompts may round as well. Knows shapes,
the call and the backend; no weights of layers but the heads' matrices, no cache but the pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from windlass.engine.model.mixers.latent_spec import LatentSpec

if TYPE_CHECKING:
    from torch import Tensor

    from windlass.kernels import AttentionCall, Backend, KVPages

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
