"""Log-probabilities of tokens under the model's own distribution, before any penalty or temperature.

It knows logits and token ids, not requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.errors import EngineError
from windlass.kernels import cpu
from windlass.kernels.cpu.sampling import MAX_VOCAB

# Rows reduced at once: the temporaries stay a few rows of the vocabulary wide.
_ROWS = 64
_BAD_LOGITS = "the model produced NaN or infinite logits for this request"


def token_logprobs(
    logits: Tensor, targets: Tensor, k: int, rows: Tensor | None = None, *, compiled: bool = True
) -> list[TokenLogprobs]:
    """What the model thought of each row's target and of its k most likely tokens.

    logits: [R, V]. targets: [N] int64. rows: [N] int64, the row of each target; all R in order when None. k: 0 .. V. The
    rank counts the tokens with a strictly larger logit, plus 1; equal alternatives are listed by id. compiled: False for
    plain torch everywhere. Raises EngineError where a row holds NaN or +inf.
    """
    if compiled and logits.is_cpu and logits.shape[1] <= MAX_VOCAB and cpu.unavailable_reason() is None:
        return _compiled(logits.float(), targets, min(k, logits.shape[1]), rows)
    found: list[TokenLogprobs] = []
    for first in range(0, len(targets), _ROWS):
        part = slice(first, first + _ROWS)
        some = logits[part] if rows is None else logits[rows[part].to(logits.device)]
        found += _slice(some.float(), targets[part].to(logits.device), min(k, logits.shape[1]))
    return found


def _compiled(logits: Tensor, targets: Tensor, k: int, rows: Tensor | None) -> list[TokenLogprobs]:
    found = cpu.token_logprobs(logits, torch.arange(len(targets)) if rows is None else rows, targets, k)
    ranks: list[int] = found.ranks.tolist()
    if 0 in ranks:
        raise EngineError(_BAD_LOGITS)
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(*top, strict=True)))
        for token, logprob, rank, top in zip(targets.tolist(), found.chosen.tolist(), ranks, tops, strict=True)
    ]


def _slice(rows: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
    normaliser = rows.logsumexp(-1, keepdim=True)  # [N, 1]
    if not bool(normaliser.isfinite().all()):
        raise EngineError(_BAD_LOGITS)
    chosen = rows.gather(1, targets.unsqueeze(1))
    ranks: list[int] = ((rows > chosen).sum(-1) + 1).tolist()
    logprobs: list[float] = (chosen - normaliser).squeeze(1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(ranks)
    if k:
        values, ids = rows.topk(k, dim=-1)
        ids, order = ids.sort(dim=-1)  # then by logit, of which two may have one logarithm
        values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        pairs = zip(ids.gather(1, order).tolist(), (values - normaliser).tolist(), strict=True)
        tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
    return [
        TokenLogprobs(token, logprob, rank, top)
        for token, logprob, rank, top in zip(targets.tolist(), logprobs, ranks, tops, strict=True)
    ]
