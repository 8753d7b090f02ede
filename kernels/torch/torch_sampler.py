"""Torch sampler: temperature, min-p, top-k, top-p, typical-p, XTC, inverse CDF, and log-probabilities, in plain torch.

A row's result depends only on its own logits and settings: retained sets are defined by thresholds on values, and sampling
walks retained tokens by id. Weights are multiples of 2^-34, so float64 sums are exact for up to 2^19 tokens in any order.
Oracle of the compiled and the Triton sampler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.token_sampling import (
    MIN_TEMPERATURE,
    Filters,
    LogitsChanges,
    Penalties,
    SamplingRow,
    SamplingStatus,
    TokenSampler,
    TopLogprobs,
)

# Logits narrowed at once: bounds memory where a flat distribution keeps everything.
_MAX_CANDIDATES = 1 << 22

_CHUNK = 512

_BINS = 2048

_MARGIN = 1e-3  # beyond any float32 rounding of a logit

_UNIT = 2.0**-34  # of weights

# exp(r) for |r| <= ln(2) / 2, as in Cephes' expf: the terms of r^2 on, highest first.
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens a row may yield, padded to the widest row.

    token_ids: [S, K] int64, ascending within a row, padding 0. logits: [S, K] float32, padding -inf. weights: [S, K] float64,
    proportional to the probability, 0 for what the filters removed and for padding; see `exact_weights`.
    """

    token_ids: Tensor
    logits: Tensor
    weights: Tensor


def sample(logits: Tensor, filters: Sequence[Filters], uniforms: Sequence[float]) -> list[int]:
    """One token id per row. logits: [S, V] float32, may hold -inf, every row's maximum finite; it is overwritten.

    filters: of temperatures above 0.
    """
    scaled = _scale(logits, filters)
    u = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(len(filters), dtype=torch.int64, device=logits.device)
    whole = [row for row, f in enumerate(filters) if f.is_noop]
    narrowed = [row for row, f in enumerate(filters) if not f.is_noop]
    if whole:
        at = torch.tensor(whole, device=logits.device)
        tokens[at] = _sample_unfiltered(_take_rows(scaled, at), u[at])
    if narrowed:
        at = torch.tensor(narrowed, device=logits.device)
        tokens[at] = _sample_filtered(_take_rows(scaled, at), [filters[row] for row in narrowed], u[at])
    found: list[int] = tokens.tolist()
    return found


def exact_weights(scaled: Tensor) -> Tensor:
    """exp(x) for x <= 0 to within 2^-23 of itself or 2^-35, a multiple of 2^-34. Float32 in and out.

    Only operations that IEEE 754 rounds in one way, in a fixed order, so that every backend has the same bits.
    """
    clamped = scaled.clamp_min(-30.0)  # there the weight is 0 already
    n = (clamped * 1.44269504).round_()
    r = (clamped - n * 0.693359375).add_(n * 2.12194440e-4)
    p = torch.full_like(r, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p.mul_(r).add_(coefficient)
    p.mul_(r).mul_(r).add_(r).add_(1.0)
    y = p.mul_(((n.int() + 127) << 23).view(torch.float32))  # times 2^n
    coarse = 2.0**-11  # below it, adding it rounds to multiples of 2^-34
    return torch.where(y < coarse, (y + coarse) - coarse, y)


def candidates(scaled: Tensor, filters: Sequence[Filters]) -> Candidates:
    """What the filters keep of each row. scaled: [S, V] float32 after temperature, every row's maximum 0."""
    floor = _thresholds(scaled, filters)
    mass: Tensor | None = None
    nucleus = [row for row, f in enumerate(filters) if f.top_p < 1 and f.top_k <= 0 and f.min_p <= 0]
    if nucleus:
        # Nothing but top-p narrows these rows. Tokens of probability below (1 - p)/V together weigh less than 1 - p, so
        # the nucleus is above them: they count in the row's mass and are not visited again. Rows already narrowed
        # by top-k or min-p have their mass in what is left.
        at = torch.tensor(nucleus, device=scaled.device)
        total = exact_weights(_take_rows(scaled, at)).sum(-1, keepdim=True, dtype=torch.float64)
        shares = torch.tensor([(1 - filters[row].top_p) / scaled.shape[1] for row in nucleus], dtype=torch.float64)
        least = (total * shares.unsqueeze(1).to(scaled.device)).sub_(_UNIT).clamp_min_(_UNIT / 4)  # a weight is rounded
        floor[at] = least.log().sub_(_MARGIN).float()
        mass = torch.full((len(filters), 1), math.nan, dtype=torch.float64, device=scaled.device)
        mass[at] = total
    return _filter(_gather(scaled, scaled >= floor), filters, mass)


def _scale(logits: Tensor, filters: Sequence[Filters]) -> Tensor:
    """(logits - row maximum) / temperature, in place: no temperature, however small, can overflow it."""
    logits.sub_(logits.amax(-1, keepdim=True))
    if any(f.temperature != 1 for f in filters):
        temperatures = [max(f.temperature, MIN_TEMPERATURE) for f in filters]
        logits.div_(torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(-1))
    return logits


def _take_rows(matrix: Tensor, at: Tensor) -> Tensor:
    return matrix if len(at) == len(matrix) else matrix.index_select(0, at)


def _sample_unfiltered(scaled: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF over whole rows, by chunks: chunk sums first, then inside the chunk that holds the target."""
    vocab = scaled.shape[1]
    weights = exact_weights(scaled)  # [S, V] float32
    body = vocab // _CHUNK * _CHUNK
    totals = [weights[:, :body].reshape(weights.shape[0], body // _CHUNK, _CHUNK).sum(-1, dtype=torch.float64)]
    if body < vocab:
        totals.append(weights[:, body:].sum(-1, keepdim=True, dtype=torch.float64))
    cumulative = torch.cat(totals, 1).cumsum_(-1)  # [S, C]
    target = _target(u, cumulative[:, -1])
    chunk = torch.searchsorted(cumulative, target, right=True)  # [S, 1]
    before = torch.cat((torch.zeros_like(target), cumulative), 1).gather(1, chunk)
    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=scaled.device)  # [S, _CHUNK]
    inside = weights.gather(1, ids.clamp_max(vocab - 1)).double().masked_fill_(ids >= vocab, 0.0)
    return ids.gather(1, _first_above(inside, target - before)).squeeze(1)


def _sample_filtered(scaled: Tensor, filters: Sequence[Filters], u: Tensor) -> Tensor:
    """Inverse CDF over the candidates, a bounded number of rows at a time."""
    at_once = max(1, _MAX_CANDIDATES // scaled.shape[1])
    drawn = []
    for first in range(0, len(filters), at_once):
        rows = slice(first, first + at_once)
        kept = candidates(scaled[rows], filters[rows])
        target = _target(u[rows], kept.weights.cumsum(-1)[:, -1])
        drawn.append(kept.token_ids.gather(1, _first_above(kept.weights, target)).squeeze(1))
    return torch.cat(drawn)


def _target(u: Tensor, total: Tensor) -> Tensor:
    """u * total as [S, 1], kept below the total, which rounding could otherwise reach."""
    return torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(1)


def _first_above(weights: Tensor, target: Tensor) -> Tensor:
    """[S, 1]: the first column whose running sum exceeds the target, but never one beyond the last positive weight."""
    cumulative = weights.cumsum(-1)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, target, right=True), last)


def _thresholds(scaled: Tensor, filters: Sequence[Filters]) -> Tensor:
    """[S, 1]: the logit at or above which min-p and top-k keep a token."""
    vocab = scaled.shape[1]
    lowest = torch.finfo(torch.float32).min  # masked tokens are -inf and never candidates
    bounds = [math.log(f.min_p) if f.min_p > 0 else lowest for f in filters]
    floor = torch.tensor(bounds, dtype=torch.float32, device=scaled.device).unsqueeze(1)
    limited = [row for row, f in enumerate(filters) if 0 < f.top_k < vocab]
    if limited:
        at = torch.tensor(limited, device=scaled.device)
        ranks = torch.tensor([filters[row].top_k - 1 for row in limited], device=scaled.device).unsqueeze(1)
        largest = _take_rows(scaled, at).topk(max(filters[row].top_k for row in limited), dim=-1).values
        floor[at] = torch.maximum(floor[at], largest.gather(1, ranks))
    return floor


def _gather(scaled: Tensor, above: Tensor) -> Candidates:
    """The tokens marked in `above` as padded candidates, weighted by `exact_weights`."""
    token_ids, inside = _compact(above)
    logits = scaled.gather(1, token_ids).masked_fill_(~inside, -math.inf)
    return Candidates(token_ids, logits, exact_weights(logits).double())


def _compact(marked: Tensor) -> tuple[Tensor, Tensor]:
    """The marked columns of each row, moved to the left: (columns [S, K] ascending, which entries are real [S, K])."""
    rows, columns = marked.nonzero().unbind(1)  # row by row, columns ascending
    ends = torch.searchsorted(rows, torch.arange(len(marked), device=marked.device), right=True)
    starts = ends.roll(1)
    starts[0] = 0
    counts = ends - starts
    width = int(counts.max())
    found = torch.zeros(len(marked), width, dtype=torch.int64, device=marked.device)
    places = torch.arange(len(columns), device=marked.device) + (rows * width - starts[rows])
    found.view(-1).index_copy_(0, places, columns)
    return found, torch.arange(width, device=marked.device) < counts.unsqueeze(1)


def _filter(found: Candidates, filters: Sequence[Filters], mass: Tensor | None) -> Candidates:
    """Top-p, typical-p and the exclusion of top choices.

    mass: [S, 1] what a row weighs where that is more than its candidates do, NaN elsewhere.
    """
    weights = found.weights
    if any(f.top_p < 1 for f in filters):
        weights = _top_p(found.logits, weights, [f.top_p for f in filters], mass)
    if any(f.typical_p < 1 for f in filters):
        weights = _typical(found.logits, weights, [f.typical_p for f in filters])
    if any(f.exclude_from < 1 for f in filters):
        weights = _exclude_top(found.logits, weights, [f.exclude_from for f in filters])
    return Candidates(found.token_ids, found.logits, weights)


def _top_p(logits: Tensor, weights: Tensor, top_p: Sequence[float], mass: Tensor | None) -> Tensor:
    """Keep the most likely tokens until their mass reaches p (arXiv 1904.09751); always at least one."""
    keys = -logits
    return weights.masked_fill(keys > _reach_mass(keys, weights, top_p, mass), 0.0)


def _typical(logits: Tensor, weights: Tensor, typical_p: Sequence[float]) -> Tensor:
    """Keep the tokens whose surprise is nearest the entropy until their mass reaches p (arXiv 2202.00666).

    Surprise less entropy is the mean logit less the token's own: no logarithm is taken.
    """
    logits = logits.double()
    # Adding it rounds to multiples of 2^-34, as products of a weight and its logarithm are above -1.
    shift = 1.5 * 2.0**18
    moments = (weights * logits.masked_fill(weights == 0, 0.0)).add_(shift).sub_(shift)
    keys = (logits - moments.sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)).abs_()
    return weights.masked_fill(keys > _reach_mass(keys, weights, typical_p), 0.0)


def _exclude_top(logits: Tensor, weights: Tensor, shares: Sequence[float]) -> Tensor:
    """Of the tokens with at least a share of the weight, keep only the least likely one, and all tokens below the share.

    "Exclude top choices" (oobabooga/text-generation-webui pull request 6335). A share of 1 keeps everything.
    """
    least = torch.tensor(shares, dtype=torch.float64, device=logits.device).unsqueeze(1) * weights.sum(-1, keepdim=True)
    top = (weights >= least) & (weights > 0)
    return weights.masked_fill(logits > logits.masked_fill(~top, math.inf).amin(-1, keepdim=True), 0.0)


def _reach_mass(keys: Tensor, weights: Tensor, shares: Sequence[float], mass: Tensor | None = None) -> Tensor:
    """[S, 1]: the key at which tokens taken by rising key first hold the wanted share of a row's weight.

    keys, weights: [S, K]; entries of weight 0 do not count. shares: 1 or more gives inf. mass: see `_filter`. Instead
    of sorting whole rows, tokens are poured into bins by key and only the bin where the share is reached is sorted.
    """
    wanted = torch.tensor(shares, dtype=torch.float64, device=keys.device).unsqueeze(1)
    counted = weights > 0
    low = keys.masked_fill(~counted, math.inf).amin(-1, keepdim=True)
    high = keys.masked_fill(~counted, -math.inf).amax(-1, keepdim=True)
    step = ((high - low) / (_BINS - 1)).clamp_min_(1e-30)
    bins = ((torch.minimum(keys, high) - low).clamp_min_(0) / step).long().clamp_max_(_BINS - 1)
    filled = torch.zeros(len(keys), _BINS, dtype=torch.float64, device=keys.device)
    cumulative = filled.scatter_add_(1, bins, weights).cumsum_(-1)
    total = cumulative[:, -1:]
    if mass is not None:
        total = torch.where(mass.isnan(), total, mass)
    # The target must not lie beyond what the bins hold, where none is filled.
    target = torch.minimum(wanted * total, cumulative[:, -1:])
    bin_ = torch.searchsorted(cumulative, target).clamp_max_(_BINS - 1)
    before = torch.where(bin_ > 0, cumulative.gather(1, (bin_ - 1).clamp_min_(0)), 0.0)

    columns, inside = _compact((bins == bin_) & counted)
    bin_keys, order = keys.gather(1, columns).masked_fill_(~inside, math.inf).sort(-1)
    bin_weights = weights.gather(1, columns).masked_fill_(~inside, 0.0).gather(1, order)
    reached = torch.searchsorted(bin_weights.cumsum_(-1).add_(before), target)
    last = inside.sum(-1, keepdim=True) - 1
    threshold = bin_keys.gather(1, torch.minimum(reached, last))
    return threshold.masked_fill_(wanted >= 1, math.inf)


def row_maxima(logits: Tensor) -> tuple[list[int], list[float]]:
    """The first index of each row's largest value, and that value; a NaN counts as the largest. logits: [R, V] float32."""
    if logits.is_cpu:
        # Numpy's reduction is vectorised where torch's is not: ten times quicker on a vocabulary.
        rows = logits.numpy()
        best = rows.argmax(1)
        return best.tolist(), rows[np.arange(len(rows)), best].tolist()
    largest = logits.max(-1)
    return largest.indices.tolist(), largest.values.tolist()


class TorchSamplingRow:
    def __init__(self, filters: Filters, penalties: Penalties) -> None:
        self.filters, self.penalties = filters, penalties
        self.row, self.uniform = 0, 0.0
        self.token, self.status = -1, int(SamplingStatus.NOTHING_LEFT)
        self._changes: LogitsChanges | None = None
        self._others: Tensor | None = None  # [V] bool, True where the changes do not allow; made when first needed

    def change(self, changes: LogitsChanges) -> None:
        if self._changes is None or changes.allowed is not self._changes.allowed:
            self._others = None
        self._changes = changes

    @property
    def changes(self) -> LogitsChanges | None:
        """The current changes of the row, or None."""
        return self._changes

    @property
    def exclude_from(self) -> float:
        return self.filters.exclude_from

    @exclude_from.setter
    def exclude_from(self, share: float) -> None:
        if share != self.filters.exclude_from:
            self.filters = replace(self.filters, exclude_from=share)

    @property
    def takes_largest(self) -> bool:
        """Whether the token is that of the row's largest logit, unchanged."""
        return self.filters.temperature <= 0 and self._changes is None

    def set_result(self, token: int, status: SamplingStatus = SamplingStatus.OK) -> None:
        self.token, self.status = token, int(status)

    def apply(self, row: Tensor) -> None:
        """Change a row [V] float32 in place: ids, bias, repetition, frequency and presence penalties, decreases."""
        changes = self._changes
        if changes is None:
            return
        if changes.allowed is not None:
            if self._others is None:
                self._others = torch.ones(len(row), dtype=torch.bool, device=row.device)
                self._others[changes.allowed] = False
            row.masked_fill_(self._others, -math.inf)
        if changes.mask is not None:
            bits = np.unpackbits(changes.mask.numpy().view(np.uint8), count=len(row), bitorder="little")
            row.masked_fill_(torch.from_numpy(bits == 0).to(row.device), -math.inf)
        if len(changes.forbidden):
            row.index_fill_(0, changes.forbidden, -math.inf)
        if len(changes.biased):
            row.index_add_(0, changes.biased, changes.bias)
        if len(changes.counted):
            self._penalise(row, changes.counted, changes.in_output)
        if len(changes.decreased):
            row.index_add_(0, changes.decreased, changes.decrease, alpha=-1)

    def _penalise(self, row: Tensor, ids: Tensor, in_output: Tensor) -> None:
        penalties, scores = self.penalties, row[ids]
        if penalties.repetition != 1:
            scores = torch.where(scores < 0, scores * penalties.repetition, scores / penalties.repetition)
        scores -= penalties.frequency * in_output
        scores -= penalties.presence * (in_output > 0)
        row.index_copy_(0, ids, scores)


class TorchSampler(TokenSampler):
    def new(self, filters: Filters, penalties: Penalties) -> TorchSamplingRow:
        return TorchSamplingRow(filters, penalties)

    def sample(self, logits: Tensor, draws: Sequence[SamplingRow]) -> None:
        best, highest = row_maxima(logits)
        changed: list[TorchSamplingRow] = []  # their logits are copied before they are changed or drawn from
        for one in cast(Sequence[TorchSamplingRow], draws):
            if not math.isfinite(highest[one.row]):
                one.set_result(-1, SamplingStatus.BAD_LOGITS)
            elif one.takes_largest:
                one.set_result(best[one.row])
            else:
                changed.append(one)
        if changed:
            rows = torch.tensor([one.row for one in changed], device=logits.device)
            _sample_changed_rows(logits.index_select(0, rows), changed)


def _sample_changed_rows(work: Tensor, draws: Sequence[TorchSamplingRow]) -> None:
    """work: [S, V], a row for each draw, to be changed."""
    for row, one in zip(work, draws, strict=True):
        one.apply(row)
    # The changes may have left nothing, a penalty may have overflowed: only these rows fail.
    best, highest = row_maxima(work)
    drawn: list[int] = []
    for at, one in enumerate(draws):
        if not math.isfinite(highest[at]):
            one.set_result(-1, SamplingStatus.NOTHING_LEFT)
        elif one.filters.temperature <= 0:
            one.set_result(best[at])
        else:
            drawn.append(at)
    if drawn:
        chosen = [draws[at] for at in drawn]
        rows = work if len(drawn) == len(work) else work[drawn]
        tokens = sample(rows, [one.filters for one in chosen], [one.uniform for one in chosen])
        for one, token in zip(chosen, tokens, strict=True):
            one.set_result(token)


# Rows reduced at once: the temporaries stay a few rows of the vocabulary wide.
_LOGPROB_ROWS = 64


def _log_sums(rows: Tensor) -> Tensor:
    return rows.logsumexp(-1, keepdim=True)


def token_logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, k: int, log_sums: Callable[[Tensor], Tensor] = _log_sums
) -> TopLogprobs:
    """Log-probabilities and alternatives of one token per row of logits [R, V].

    rows, targets: [N] int64. k: 0 .. V. log_sums: of the exponentials of float32 rows [n, V], as [n, 1].
    """
    count = len(targets)
    found = TopLogprobs(
        np.empty(count, np.float32),
        np.zeros(count, np.int64),
        np.empty((count, k), np.int64),
        np.empty((count, k), np.float32),
    )
    for first in range(0, count, _LOGPROB_ROWS):
        part = slice(first, first + _LOGPROB_ROWS)
        _fill_logprobs(
            found, part, logits[rows[part].to(logits.device)].float(), targets[part].to(logits.device), log_sums
        )
    return found


def _fill_logprobs(
    found: TopLogprobs, part: slice, rows: Tensor, targets: Tensor, log_sums: Callable[[Tensor], Tensor]
) -> None:
    normaliser = log_sums(rows)  # [N, 1]
    chosen = rows.gather(1, targets.unsqueeze(1))
    ranks = ((rows > chosen).sum(-1) + 1).where(normaliser.squeeze(1).isfinite(), 0)
    found.ranks[part] = ranks.cpu().numpy()
    found.chosen[part] = (chosen - normaliser).squeeze(1).cpu().numpy()
    k = found.top.shape[1]
    if k:
        # Elsewhere topk may take any of equal ones.
        values, ids = rows.topk(k, dim=-1) if rows.is_cpu else _first_largest(rows, k)
        ids, order = ids.sort(dim=-1)  # then by logit, of which two may have one logarithm
        values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        found.top_ids[part] = ids.gather(1, order).cpu().numpy()
        found.top[part] = (values - normaliser).cpu().numpy()


def _first_largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row and their places; of equal ones the first."""
    found = rows.sort(dim=-1, descending=True, stable=True)
    return found.values[:, :k], found.indices[:, :k]
