"""Log-probabilities of tokens in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from windlass.kernels.draws import TopLogprobs

# Rows reduced at once: the temporaries stay a few rows of the vocabulary wide.
_LOGPROB_ROWS = 64


def _log_sums(rows: Tensor) -> Tensor:
    return rows.logsumexp(-1, keepdim=True)


def token_logprobs(
    logits: Tensor, rows: Tensor, targets: Tensor, k: int, log_sums: Callable[[Tensor], Tensor] = _log_sums
) -> TopLogprobs:
    """What rows of logits [R, V] say of a token each. rows, targets: [N] int64. k: 0 .. V. log_sums: of the exponentials of
    float32 rows [n, V], as [n, 1]."""
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
