"""Log-probabilities of tokens under the model's own distribution, before any penalty or temperature.

It knows logits and token ids, not requests.
"""

from __future__ import annotations

from torch import Tensor

from windlass.engine.errors import EngineError
from windlass.engine.request import TokenLogprobs

# Rows reduced at once: the temporaries stay a few rows of the vocabulary wide.
_ROWS = 64


def token_logprobs(logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
    """What the model thought of each row's target and of its k most likely tokens.

    logits: [N, V]. targets: [N] int64. k: 0 .. V. The rank counts the tokens with a strictly larger logit, plus 1;
    equal alternatives are listed by id. Raises EngineError where a row holds NaN or +inf.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(targets), _ROWS):
        rows = logits[first : first + _ROWS].float()
        found += _slice(rows, targets[first : first + _ROWS].to(rows.device), min(k, rows.shape[1]))
    return found


def _slice(rows: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
    normaliser = rows.logsumexp(-1, keepdim=True)  # [N, 1]
    if not bool(normaliser.isfinite().all()):
        raise EngineError("the model produced NaN or infinite logits for this request")
    chosen = rows.gather(1, targets.unsqueeze(1))
    ranks: list[int] = ((rows > chosen).sum(-1) + 1).tolist()
    logprobs: list[float] = (chosen - normaliser).squeeze(1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(ranks)
    if k:
        values, ids = rows.topk(k, dim=-1)
        pairs = zip(ids.tolist(), (values - normaliser).tolist(), strict=True)
        tops = [tuple(sorted(zip(*pair, strict=True), key=lambda top: (-top[1], top[0]))) for pair in pairs]
    return [
        TokenLogprobs(token, logprob, rank, top)
        for token, logprob, rank, top in zip(targets.tolist(), logprobs, ranks, tops, strict=True)
    ]
