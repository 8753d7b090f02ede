"""Reference implementations in plain torch: the oracle of all other backends. Clarity before speed.

Functions named like an operation of `Backend` perform it. Recurrent layers run token by token, so that elementary functions
and sums always have the shape of one token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall
from windlass.kernels.backend import Routed, Routing, StateRows
from windlass.kernels.layouts import kv_pages
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.layouts.weight_layouts import ExpertWeights


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + d/2) of the first d = 2 * cos.shape[-1] dims of x by the given angles (RoFormer, 2104.09864).

    x: [T, H, D], cos and sin: [T, d/2] float32. Returns float32 [T, H, D]; dims past d are passed through.
    """
    half = cos.shape[-1]
    x = x.float()
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, d/2]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


MAX_SCORE_BYTES = 64 << 20  # of scores held at once by attention over ranges

SMALLEST_SCALE = 2.0**-100  # of an int8 head; below it, the head counts as zeros


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of every head of x [..., D] and their float32 scales [...]: x is about codes * scale.

    A scale is the largest magnitude of its head over 127, so the error is at most half a step. It is 0 for a head of (nearly)
    zeros, and NaN for one that is not finite, so that every result that reads the head is NaN.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    scale = torch.where(largest.isfinite(), largest / 127.0, torch.nan)
    usable = scale >= SMALLEST_SCALE
    codes = torch.where(usable[..., None], x / scale[..., None], 0.0).round().to(torch.int8)
    return codes, torch.where(usable | scale.isnan(), scale, 0.0)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` for every 32 numbers of x [..., D]: int8 [..., D] and float32 scales [..., ceil(D / 32)]."""
    groups = kv_pages.num_groups(x.shape[-1])
    padded = F.pad(x, (0, groups * kv_pages.GROUP - x.shape[-1]))
    codes, scales = quantize(padded.view(*x.shape[:-1], groups, kv_pages.GROUP))
    return codes.flatten(-2)[..., : x.shape[-1]], scales


def _by_slot(pages: Tensor) -> Tensor:
    """Pages of rows as [slots, Hkv, D]."""
    return pages.view(pages.shape[0] * pages.shape[1], *pages.shape[2:])


def _put(pages: Tensor, slots: Tensor, x: Tensor) -> None:
    flat = _by_slot(pages)
    if pages.dtype == torch.float8_e4m3fn:
        # Some releases of torch convert larger numbers to infinity, and none copies rows of this type.
        x = x if x.dtype == pages.dtype else x.clamp(-448, 448).to(pages.dtype)
        flat, own = flat.view(torch.uint8), x.view(torch.uint8)
    else:
        own = x.to(pages.dtype)
    flat.index_copy_(0, slots, own)


def _store_keys(pages: KVPages, slots: Tensor, x: Tensor) -> None:
    """Write x [N, Hkv, D] float32 to slots of the key pages, rounded to their dtype; of latent rows, the first groups."""
    if pages.key_scale is None:
        _put(pages.key, slots, x)
    elif pages.has_rows_of_codes:
        codes, scales = quantize_rows(x)
        _by_slot(pages.key)[slots, :, : x.shape[-1]] = codes
        _by_slot(pages.key_scale)[slots, :, : scales.shape[-1]] = scales
    else:
        codes, scales = quantize(x)
        kv_pages.put_keys(pages.key, slots, codes)
        kv_pages.put_scales(pages.key_scale, slots, scales)


def _store_values(pages: KVPages, slots: Tensor, x: Tensor) -> None:
    """Write x [N, Hkv, Dv] to slots of the value pages, rounded to their dtype."""
    if pages.value_scale is None:
        _put(pages.value, slots, x)
    elif not pages.has_rows_of_codes:
        codes, scales = quantize(x)
        kv_pages.put_values(pages.value, slots, codes)
        kv_pages.put_scales(pages.value_scale, slots, scales)


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
) -> None:
    rotary_dim = 2 * cos.shape[-1]
    rotated = rotate_half_split(q, cos, sin)
    rotated[..., :rotary_dim] *= q_scale[:, None, None]
    q.copy_(rotated)
    if not k.shape[1]:
        return
    written = slots >= 0
    if not written.all():
        k, v, cos, sin, slots = k[written], v[written], cos[written], sin[written], slots[written]
    _store_keys(pages, slots, rotate_half_split(k, cos, sin))
    _store_values(pages, slots, v)


def rerotate_cached_keys(
    pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
) -> None:
    """Slots are not checked. Groups of latent rows without rotary dims are copied bit by
    bit."""
    if pages.has_rows_of_codes:
        _rerotate_rows(pages, sources, targets, cos, sin)
        return
    if pages.key_scale is None or pages.value_scale is None:
        keys, flat = _by_slot(pages.key), _by_slot(pages.value)
        _store_keys(pages, targets, rotate_half_split(keys[sources], cos, sin))
        if values:
            _put(pages.value, targets, flat[sources])
        return
    codes = kv_pages.take_keys(pages.key, sources)
    scales = kv_pages.take_scales(pages.key_scale, sources)
    if cos.shape[-1]:
        _store_keys(pages, targets, rotate_half_split(codes.float() * scales[..., None], cos, sin))
    else:
        kv_pages.put_keys(pages.key, targets, codes)
        kv_pages.put_scales(pages.key_scale, targets, scales)
    if values:
        kv_pages.put_values(pages.value, targets, kv_pages.take_values(pages.value, sources))
        kv_pages.put_scales(pages.value_scale, targets, kv_pages.take_scales(pages.value_scale, sources))


def _rerotate_rows(pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`rerotate_cached_keys` of latent rows."""
    assert pages.key_scale is not None
    codes, scales = _by_slot(pages.key), _by_slot(pages.key_scale)
    own, theirs = codes[sources], scales[sources]  # [N, Hkv, D], [N, Hkv, groups]
    codes[targets], scales[targets] = own, theirs
    num_rotated_groups = kv_pages.num_groups(2 * cos.shape[-1])
    if num_rotated_groups:
        dims = min(num_rotated_groups * kv_pages.GROUP, own.shape[-1])
        rotated = rotate_half_split(kv_pages.widened(own[..., :dims], theirs[..., :num_rotated_groups]), cos, sin)
        _store_keys(pages, targets, rotated)


def rotate_queries(q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < q.shape[0]:
        raise IndexError(f"rotate_queries: a row is not one of {q.shape[0]}")
    return torch.cat((q, rotate_half_split(q[rows], cos, sin).to(q.dtype)))


@functools.cache
def rounded(factor: float, dtype: torch.dtype) -> float:
    """A factor rounded to a compute dtype. Cached, since a captured step must not read a number from a tensor."""
    return float(torch.tensor(factor, dtype=dtype))


def rotary_angles(inv_freq: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    angles = inv_freq.index_select(1, rows) * positions.unsqueeze(-1)
    return angles.cos().float(), angles.sin().float()


def paged_attention(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """Every field of `AttentionCall` is supported.

    With ranges, queries are processed in blocks whose scores take at most 64 MiB. Raises ValueError if q and the call disagree
    about tokens or the ranges end before the last key, and IndexError for a row that q lacks.
    """
    if q.shape[0] < call.num_tokens or (q.shape[0] > call.num_tokens and not call.has_ranges):
        raise ValueError(f"q has {q.shape[0]} rows for {call.num_tokens} tokens")
    num_heads, num_kv_heads = q.shape[-2], pages.num_kv_heads
    out = q.new_empty(call.num_tokens, num_heads, pages.value_dim)
    for rows, length, own in call.sequences():
        num_queries = rows.stop - rows.start
        if own.has_ranges:
            step = max(1, MAX_SCORE_BYTES // (4 * num_heads * max(length, 1)))
            for begin in range(0, num_queries, step):
                end_query = min(begin + step, num_queries)
                found = _attend_ranges(q, pages, own.slice_tokens(begin, end_query))
                out[rows.start + begin : rows.start + end_query] = found.to(q.dtype)
            continue
        block_size = pages.block_size
        first, end = call.visible(torch.arange(length - num_queries, length), length)  # [Q], on the host
        first_key, end_key = int(first[0]), int(end[-1])
        first_block = first_key // block_size
        table = own.block_tables[0, first_block : -(-end_key // block_size)].long()
        seen = slice(first_key - first_block * block_size, end_key - first_block * block_size)
        keys = pages.keys_of(table, q.shape[-1]).flatten(0, 1)[seen]  # [S, Hkv, D]
        values = pages.values_of(table).flatten(0, 1)[seen]  # [S, Hkv, Dv]
        key_index = torch.arange(first_key, end_key, device=q.device)
        query = q[rows].float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, -1)
        scores = torch.einsum("qhgd,khd->hgqk", query, keys)
        first, end = first[:, None].to(q.device), end[:, None].to(q.device)
        hidden = (key_index < first) | (key_index >= end)
        out[rows] = _weigh(scores, values, hidden, own).to(q.dtype)
    return out


def _attend_ranges(q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
    """The new tokens of one sequence over its ranges: float32 [Q, Hq, Dv]."""
    num_queries, num_heads, num_kv_heads, block_size = call.num_tokens, q.shape[1], pages.num_kv_heads, pages.block_size
    index = torch.arange(num_queries, device=q.device)[:, None] + (int(call.seq_lens[0]) - num_queries)  # [Q, 1]
    scores = [torch.zeros(num_kv_heads, num_heads // num_kv_heads, num_queries, 0, device=q.device)]
    values = [torch.zeros(0, num_kv_heads, pages.value_dim, device=q.device)]
    hidden = [torch.zeros(num_queries, 0, dtype=torch.bool, device=q.device)]
    distances = [torch.zeros(num_queries, 0, device=q.device)]
    for begin, end, row, reach, gap in call.key_ranges():
        if row + num_queries > q.shape[0]:
            raise IndexError(f"ranges name rows {row} to {row + num_queries - 1}, and q has {q.shape[0]}")
        first_block = begin // block_size
        table = call.block_tables[0, first_block : -(-end // block_size)].long()
        seen = slice(begin - first_block * block_size, end - first_block * block_size)
        keys = pages.keys_of(table, q.shape[-1]).flatten(0, 1)[seen]  # [S, Hkv, D]
        query = q[row : row + num_queries].float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, -1)
        scores.append(torch.einsum("qhgd,khd->hgqk", query, keys))
        values.append(pages.values_of(table).flatten(0, 1)[seen])  # [S, Hkv, Dv]
        key_index = torch.arange(begin, end, device=q.device)
        hidden.append((key_index > index) | (index - key_index >= reach if reach >= 0 else index - key_index < -reach))
        distances.append((index - key_index + gap).float())
    bias = None
    if call.alibi_slopes is not None:
        bias = -call.alibi_slopes.view(num_kv_heads, -1, 1, 1) * torch.cat(distances, dim=-1)  # [Hkv, Hq / Hkv, Q, S]
    return _weigh(torch.cat(scores, dim=-1), torch.cat(values), torch.cat(hidden, dim=-1), call, bias)


def _weigh(scores: Tensor, values: Tensor, hidden: Tensor, call: AttentionCall, bias: Tensor | None = None) -> Tensor:
    """The result [Q, Hq, Dv] of one sequence. scores: products [Hkv, Hq / Hkv, Q, S]. values: [S, Hkv, Dv]. hidden: [Q, S].

    bias: added to scaled and capped scores, of the same shape.
    """
    num_kv_heads, group, num_queries, num_keys = scores.shape
    scores = scores * (call.scale * call.score_scale[:, None])
    if call.soft_cap is not None:
        scores = soft_cap(scores, call.soft_cap)
    if bias is not None:
        scores = scores + bias
    scores.masked_fill_(hidden, float("-inf"))
    if call.sink_logits is not None:
        sinks = call.sink_logits.view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(num_queries, num_kv_heads * group, -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate, activation) * up


def clamped_glu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "gelu":
        return F.gelu(x)
    if activation == "relu2":
        return F.relu(x).square()
    raise ValueError(f"unknown activation {activation!r}")


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    wide = x.float()
    above = F.softplus(alpha_p) * wide * wide + beta * wide
    below = (beta + F.softplus(alpha_n)) * (torch.expm1(torch.minimum(wide, eps)) - wide) + beta * wide
    return torch.where(wide > 0, above, below).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    wide = x.float()
    x.copy_(wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight)


def latent_queries(q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
    return torch.cat((q[..., :rotary_dim], head_products(q[..., rotary_dim:], key_matrices(up, q, rotary_dim))), dim=-1)


def latent_values(attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
    return head_products(attended, up[:, up.shape[1] - value_dim :].transpose(1, 2)).flatten(1)


def key_matrices(up: Tensor, q: Tensor, rotary_dim: int) -> Tensor:
    return up[:, : q.shape[2] - rotary_dim]  # [H, N, C]


def head_products(x: Tensor, matrices: Tensor) -> Tensor:
    """x: [T, H, K], matrices: [H, K, N]. Returns [T, H, N] in x's dtype; sums are float32 on a CPU."""
    compute = torch.float32 if x.is_cpu else x.dtype
    return torch.bmm(x.transpose(0, 1).to(compute), matrices.to(compute)).transpose(0, 1).to(x.dtype)


_LENGTH_EPS = 1e-6


def short_convolution(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for block, first, end, fresh in _spans(rows):
        before = torch.zeros_like(window[block]) if fresh else window[block]
        inputs = torch.cat((before, x[first:end].float()))  # [W - 1 + n, C]
        for t in range(end - first):
            total = torch.zeros_like(inputs[0]) if bias is None else bias.clone()
            for i in range(width):
                total += inputs[t + i] * weight[:, i]
            out[first + t] = total if activation is None else torch.nn.functional.silu(total)
            _store_snapshot(inputs[t + 1 : t + width], window, rows, first + t)
        window[block] = inputs[end - first :]
    return out


def gated_delta_rule(
    qkv: Tensor,
    decay: Tensor,
    strength: Tensor,
    rate: Tensor,
    bias: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    tiled_heads: bool = False,
) -> Tensor:
    _, heads, key_dim, value_dim = memory.shape
    key_width = (qkv.shape[1] - heads * value_dim) // 2
    key_heads = key_width // key_dim
    head = torch.arange(heads, device=qkv.device)
    of_head = head % key_heads if tiled_heads else head // (heads // key_heads)
    out = torch.zeros((qkv.shape[0], heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    for block, first, end, fresh in _spans(rows):
        m = torch.zeros_like(memory[block]) if fresh else memory[block].clone()  # [Hv, Dk, Dv]
        for t in range(first, end):
            q, k, v = qkv[t].float().split_with_sizes([key_width, key_width, heads * value_dim])
            q, k = (_unit(part.reshape(-1, key_dim))[of_head] for part in (q, k))  # [Hv, Dk]
            m *= torch.exp(-rate * torch.nn.functional.softplus(decay[t].float() + bias))[:, None, None]
            known = (m * k[:, :, None]).sum(1)  # [Hv, Dv]
            share = torch.sigmoid(strength[t].float())
            m += k[:, :, None] * (share[:, None] * (v.view(heads, value_dim) - known))[:, None]
            out[t] = (m * (q * key_dim**-0.5)[:, :, None]).sum(1)
            _store_snapshot(m, memory, rows, t)
        memory[block] = m
    return out.flatten(1)


def state_space(
    mixed: Tensor,
    step: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor,
    memory: Tensor,
    rows: StateRows,
    *,
    limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    _, heads, key_dim, value_dim = memory.shape
    key_width = (mixed.shape[1] - heads * value_dim) // 2
    of_head = torch.arange(heads, device=mixed.device) // (heads * key_dim // key_width)
    out = torch.zeros((mixed.shape[0], heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    for block, first, end, fresh in _spans(rows):
        m = torch.zeros_like(memory[block]) if fresh else memory[block].clone()  # [Hv, Dk, Dv]
        for t in range(first, end):
            v, k, q = mixed[t].float().split_with_sizes([heads * value_dim, key_width, key_width])
            k, q = (part.reshape(-1, key_dim)[of_head] for part in (k, q))  # [Hv, Dk]
            v = v.view(heads, value_dim)
            d = torch.nn.functional.softplus(step[t].float() + bias).clamp(*limits)
            m *= torch.exp(-rate * d)[:, None, None]
            m += k[:, :, None] * (d[:, None] * v)[:, None]
            out[t] = (m * q[:, :, None]).sum(1) + skip[:, None] * v
            _store_snapshot(m, memory, rows, t)
        memory[block] = m
    return out.flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPS)


def _store_snapshot(state: Tensor, states: Tensor, rows: StateRows, token: int) -> None:
    if rows.snapshots is not None and (block := int(rows.snapshots[token])) >= 0:
        states[block] = state


def _spans(rows: StateRows) -> list[tuple[int, int, int, bool]]:
    """Per sequence: block, first token, end token, and whether it starts from a zero state."""
    starts = rows.starts.tolist()
    spans = zip(rows.blocks.tolist(), starts[:-1], starts[1:], rows.lengths.tolist(), strict=True)
    return [
        (block, first, end, length == end - first) for block, first, end, length in spans if end > first and block != -1
    ]


Linear: TypeAlias = Callable[[Tensor, Any, Tensor | None], Tensor]  # see `Backend.linear`


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None) -> Routed:
    found = _sparsemixer(logits, routing) if routing.scores == "sparsemixer" else _largest(logits, routing, bias)
    return found if scales is None else Routed(found.chosen, found.weights * scales[found.chosen])


def _largest(logits: Tensor, routing: Routing, bias: Tensor | None) -> Routed:
    scores = logits.softmax(dim=-1) if routing.scores == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = ranked.view(ranked.shape[0], routing.groups, -1)  # [T, groups, E / groups]
        best = grouped.topk(1 if routing.group_score == "largest" else 2, dim=-1).values.sum(dim=-1)
        left_out = _best(best, routing.groups)[:, routing.top_groups :]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, left_out, True)
        ranked = grouped.masked_fill(mask[:, :, None], float("-inf")).flatten(1)
    chosen = _best(ranked, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.sum_eps).clamp(min=routing.least_sum)
    return Routed(chosen, weights * routing.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest scores; of equal ones, the first comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _sparsemixer(logits: Tensor, routing: Routing) -> Routed:
    left, chosen, weights = logits, [], []
    for _ in range(routing.top_k):
        first = _best(left, 1)
        largest = left.gather(1, first)
        far = (largest - logits) / logits.abs().maximum(largest) > 2 * routing.jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, first))
        chosen.append(first)
        left = left.scatter(1, first, float("-inf"))
    return Routed(torch.cat(chosen, dim=1), torch.cat(weights, dim=1) * routing.scale)


def linear_of_experts(x: Tensor, experts: ExpertWeights, chosen: Tensor, linear: Linear) -> Tensor:
    """One `linear` for each chosen expert."""
    per_row = chosen.numel() // max(x.shape[0], 1)  # experts per row of x
    out = torch.empty((chosen.numel(), experts.columns), dtype=x.dtype, device=x.device)
    ordered = chosen.flatten().sort(stable=True)
    counts = ordered.values.bincount(minlength=len(experts)).tolist()
    for expert, places in enumerate(ordered.indices.split_with_sizes(counts)):
        if not len(places):
            continue
        out[places] = linear(x[places // per_row], experts.weights[expert], experts.bias(expert))
    return out


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """`Backend.sum_of_experts`."""
    tokens, count = weights.shape
    parts = x.view(tokens, count, x.shape[1])
    total = parts[:, 0].float() * weights[:, :1]
    for place in range(1, count):
        total += parts[:, place].float() * weights[:, place : place + 1]
    return total.to(x.dtype)
