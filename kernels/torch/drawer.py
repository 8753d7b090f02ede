"""Changes of logits and draws from them in plain torch; the arithmetic of a draw is that of `sample`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.draws import Filters, LogitsChanges, Penalties, SamplingRow, SamplingStatus, TokenSampler
from windlass.kernels.torch.draw import row_maxima, sample


class TorchSamplingRow:
    """See `SamplingRow`."""

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
        """What was last said to be done to the row, None for nothing."""
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
    """See `TokenSampler`."""

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
