"""Draws one token per row of processed logits: temperature, min-p, top-k, top-p, typical-p, inverse CDF.

Responsible for probabilities only; it knows no requests and keeps no state. What a row yields depends on that row and
its own settings, never on the rows beside it: every kept set is defined by a threshold on values (equal logits stand or
fall together) and every draw walks the kept tokens in the order of their ids, in float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Entries of the padded candidate matrix handled at once: bounds memory when a flat distribution keeps everything.
_MAX_CANDIDATES = 1 << 22
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Filters:
    """How one row is narrowed before the draw; the defaults keep everything. temperature is greater than 0."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0

    @property
    def keep_all(self) -> bool:
        return self.min_p <= 0 and self.top_k <= 0 and self.top_p >= 1 and self.typical_p >= 1


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens a row may yield, padded to the widest row.

    token_ids: [S, K] int64, ascending within a row, padding 0. weights: [S, K] float64, proportional to the
    probability, 0 for what the filters removed and for padding.
    """

    token_ids: Tensor
    weights: Tensor


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments alone: 53 bits of BLAKE2b over them.

    position counts the tokens already drawn; so neither preemption nor batching can change a draw.
    """
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, index, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: Tensor, filters: Sequence[Filters], uniforms: Sequence[float]) -> list[int]:
    """One token id per row. logits: [S, V] float32, may hold -inf, every row's maximum finite; it is overwritten."""
    scaled = _scale(logits, filters)
    u = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(len(filters), dtype=torch.int64, device=logits.device)
    whole = [row for row, f in enumerate(filters) if f.keep_all]
    narrowed = [row for row, f in enumerate(filters) if not f.keep_all]
    if whole:
        at = torch.tensor(whole, device=logits.device)
        tokens[at] = _draw_from_all(_rows(scaled, at), u[at])
    if narrowed:
        at = torch.tensor(narrowed, device=logits.device)
        tokens[at] = _draw_narrowed(_rows(scaled, at), [filters[row] for row in narrowed], u[at])
    found: list[int] = tokens.tolist()
    return found


def candidates(scaled: Tensor, filters: Sequence[Filters]) -> Candidates:
    """What the filters keep of each row. scaled: [S, V] float32 after temperature, every row's maximum 0."""
    floor = _thresholds(scaled, filters)
    return _filter(_gather_above(scaled, floor), filters)


def _scale(logits: Tensor, filters: Sequence[Filters]) -> Tensor:
    """(logits - row maximum) / temperature, in place: no temperature, however small, can overflow it."""
    logits.sub_(logits.amax(-1, keepdim=True))
    if any(f.temperature != 1 for f in filters):
        # Below the smallest normal float32 a temperature would become 0; it means greedy long before that.
        temperatures = [max(f.temperature, 1e-30) for f in filters]
        logits.div_(torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(-1))
    return logits


def _rows(matrix: Tensor, at: Tensor) -> Tensor:
    return matrix if len(at) == len(matrix) else matrix.index_select(0, at)


def _draw_from_all(scaled: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF over whole rows, by chunks: chunk sums first, then inside the chunk that holds the target."""
    vocab = scaled.shape[1]
    weights = scaled.exp()  # [S, V] float32
    body = vocab // _CHUNK * _CHUNK
    totals = [weights[:, :body].unflatten(1, (body // _CHUNK, _CHUNK)).sum(-1, dtype=torch.float64)]
    if body < vocab:
        totals.append(weights[:, body:].sum(-1, keepdim=True, dtype=torch.float64))
    cumulative = torch.cat(totals, 1).cumsum_(-1)  # [S, C]
    target = _target(u, cumulative[:, -1])
    chunk = (cumulative <= target).sum(-1, keepdim=True)  # [S, 1]
    before = torch.cat((torch.zeros_like(target), cumulative), 1).gather(1, chunk)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=scaled.device)  # [S, _CHUNK]
    inside = weights.gather(1, ids.clamp_max(vocab - 1)).double().masked_fill_(ids >= vocab, 0.0)
    return ids.gather(1, _first_above(inside, target - before)).squeeze(1)


def _draw_narrowed(scaled: Tensor, filters: Sequence[Filters], u: Tensor) -> Tensor:
    """Inverse CDF over the candidates, a bounded number of rows at a time."""
    floor = _thresholds(scaled, filters)
    counts: list[int] = (scaled >= floor).sum(-1).tolist()
    drawn = []
    for first, last in _groups(counts):
        rows = slice(first, last)
        kept = _filter(_gather_above(scaled[rows], floor[rows]), filters[rows])
        total = kept.weights.cumsum(-1)[:, -1]
        drawn.append(kept.token_ids.gather(1, _first_above(kept.weights, _target(u[rows], total))).squeeze(1))
    return torch.cat(drawn)


def _groups(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Cut consecutive rows into groups whose padded matrix stays under _MAX_CANDIDATES entries."""
    groups, first, widest = [], 0, 0
    for row, count in enumerate(counts):
        if row > first and max(widest, count) * (row - first + 1) > _MAX_CANDIDATES:
            groups.append((first, row))
            first, widest = row, 0
        widest = max(widest, count)
    return [*groups, (first, len(counts))]


def _target(u: Tensor, total: Tensor) -> Tensor:
    """u * total as [S, 1], kept below the total, which rounding could otherwise reach."""
    return torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(1)


def _first_above(weights: Tensor, target: Tensor) -> Tensor:
    """[S, 1]: the first column whose running sum exceeds the target, but never one beyond the last positive weight."""
    column = (weights.cumsum(-1) <= target).sum(-1, keepdim=True)
    columns = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, columns, 0).amax(-1, keepdim=True)
    return torch.minimum(column, last)


def _thresholds(scaled: Tensor, filters: Sequence[Filters]) -> Tensor:
    """[S, 1]: a value below which no kept logit lies; it settles min-p and top-k and prunes for top-p.

    Top-p: tokens of probability below (1 - p)/V together weigh less than 1 - p, so the nucleus lies above them. The
    maximum is 0, so a probability is at most exp(logit), whatever else is removed, and ln((1 - p)/V) is a safe bound.
    """
    vocab = scaled.shape[1]
    lowest = torch.finfo(torch.float32).min  # masked tokens are -inf and never candidates
    bounds = []
    for f in filters:
        bound = lowest
        if f.min_p > 0:
            bound = max(bound, math.log(f.min_p))
        if f.top_p < 1:
            # The margin covers float32 rounding of the logits.
            bound = max(bound, math.log((1 - f.top_p) / vocab) - 1e-3)
        bounds.append(bound)
    floor = torch.tensor(bounds, dtype=torch.float32, device=scaled.device).unsqueeze(1)
    limited = [row for row, f in enumerate(filters) if 0 < f.top_k < vocab]
    if limited:
        at = torch.tensor(limited, device=scaled.device)
        ranks = torch.tensor([filters[row].top_k - 1 for row in limited], device=scaled.device).unsqueeze(1)
        largest = _rows(scaled, at).topk(max(filters[row].top_k for row in limited), dim=-1).values
        floor[at] = torch.maximum(floor[at], largest.gather(1, ranks))
    return floor


def _gather_above(scaled: Tensor, floor: Tensor) -> Candidates:
    """The tokens at or above each row's floor as padded candidates, weighted exp(logit)."""
    above = scaled >= floor
    rows, ids = above.nonzero(as_tuple=True)  # row by row, ids ascending
    counts = above.sum(-1)
    starts = counts.cumsum(0) - counts
    columns = torch.arange(len(ids), device=scaled.device) - starts[rows]
    width = int(counts.max())
    token_ids = torch.zeros(len(scaled), width, dtype=torch.int64, device=scaled.device)
    weights = torch.zeros(len(scaled), width, dtype=torch.float64, device=scaled.device)
    token_ids[rows, columns] = ids
    weights[rows, columns] = scaled[rows, ids].double().exp_()
    return Candidates(token_ids, weights)


def _filter(found: Candidates, filters: Sequence[Filters]) -> Candidates:
    weights = found.weights
    if any(f.top_p < 1 for f in filters):
        weights = _top_p(weights, [f.top_p for f in filters])
    if any(f.typical_p < 1 for f in filters):
        weights = _typical(weights, [f.typical_p for f in filters])
    return Candidates(found.token_ids, weights)


def _top_p(weights: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keep the most likely tokens until their mass reaches p (arXiv 1904.09751); always at least one."""
    wanted = torch.tensor(top_p, dtype=torch.float64, device=weights.device).unsqueeze(1)
    ordered = weights.sort(-1, descending=True).values
    cumulative = ordered.cumsum(-1)
    needed = (cumulative - ordered < wanted * cumulative[:, -1:]).sum(-1, keepdim=True).clamp_min_(1)
    least = ordered.gather(1, needed - 1).masked_fill_(wanted >= 1, 0.0)
    return weights.masked_fill(weights < least, 0.0)


def _typical(weights: Tensor, typical_p: Sequence[float]) -> Tensor:
    """Keep the tokens whose surprise is nearest the entropy until their mass reaches p (arXiv 2202.00666)."""
    wanted = torch.tensor(typical_p, dtype=torch.float64, device=weights.device).unsqueeze(1)
    probabilities = weights / weights.sum(-1, keepdim=True)
    surprise = -probabilities.log()  # inf where removed
    entropy = torch.where(probabilities > 0, probabilities * surprise, 0.0).sum(-1, keepdim=True)
    distance = (surprise - entropy).abs()
    ordered, order = distance.sort(-1)
    reached = (probabilities.gather(1, order).cumsum(-1) < wanted).sum(-1, keepdim=True)
    farthest = ordered.gather(1, reached.clamp_max_(weights.shape[1] - 1)).masked_fill_(wanted >= 1, math.inf)
    return weights.masked_fill(distance > farthest, 0.0)
