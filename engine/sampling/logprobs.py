"""Log-probabilities of tokens under the model's own distribution, before any penalty or temperature.

It knows logits and token ids, not requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.errors import EngineError
from windlass.kernels import Backend

BAD_LOGITS = "the model produced NaN or infinite logits for this request"


def token_logprobs(
    backend: Backend, logits: Tensor, targets: Tensor, k: int, rows: Tensor | None = None
) -> list[TokenLogprobs]:
    """What the model thought of each row's target and of its k most likely tokens.

    logits: [R, V]. targets: [N] int64. rows: [N] int64, the row of each target; all R in order when None. k: 0 .. V. The
    rank counts the tokens with a strictly larger logit, plus 1; equal alternatives are listed by id. Raises EngineError
    where a row holds NaN or +inf.
    """
    if rows is None:
        rows = torch.arange(len(targets))
    found = backend.token_logprobs(logits.float(), rows, targets, min(k, logits.shape[1]))
    ranks: list[int] = found.ranks.tolist()
    if 0 in ranks:
        raise EngineError(BAD_LOGITS)
    tops = zip(found.top_ids.tolist(), found.top.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(*top, strict=True)))
        for token, logprob, rank, top in zip(targets.tolist(), found.chosen.tolist(), ranks, tops, strict=True)
    ]
