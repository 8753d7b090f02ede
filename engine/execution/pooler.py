"""Pooler: embeddings, classes and scores from a prompt's hidden states, chunk by chunk.

Stores the partial result (a sum, or rows) between chunks. A prompt that restarts at its first token restarts here too.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from windlass.engine.errors import EngineError, NotFiniteError
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.engine.model.decoder import Decoder

_CHUNKS_MISSING = "the partial result of this prompt is lost: send it again"

_NOT_FINITE = (
    "the model's result for this prompt is not finite: its adapter, its rotary scaling or the model's weights let numbers "
    "overflow; use others"
)


class Pooler:
    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._partial: dict[int, list[Tensor]] = {}  # by sequence

    def forget(self, seq_id: int) -> None:
        """Drop the partial result of a sequence that has ended or restarts; unknown ids are ignored."""
        self._partial.pop(seq_id, None)

    def add(
        self, seq_id: int, rule: PoolingRule, rows: Tensor, start: int, length: int, logits: Tensor | None = None
    ) -> PooledRows | None:
        """Add the normed states [n, hidden] of tokens start .. start + n - 1 of a prompt of `length` tokens.

        logits: [V] after the last token, for rules that compare answers. Returns the result with the last chunk. Raises
        EngineError if earlier chunks are missing, NotFiniteError if the result is not finite.
        """
        last = start + rows.shape[0] == length
        if rule.reads_every_token:
            partial = self._partial.setdefault(seq_id, []) if start == 0 else self._partial.get(seq_id)
            if partial is None:
                raise EngineError(_CHUNKS_MISSING)
            if start == 0:
                partial.clear()
            self._accumulate(partial, rule, rows, start)
            if not last:
                return None
            del self._partial[seq_id]
            pooled = torch.cat(partial) if rule.kind in ("all", "classify tokens") else partial[0][None]
            if rule.kind == "mean":
                pooled = pooled / length
        elif not last:
            return None
        elif rule.kind == "answer":
            assert logits is not None
            wanted, *other = logits[list(rule.answers)].double()
            pooled = (wanted - sum(other))[None, None]
        elif rule.kind == "classify":
            pooled = self._decoder.classes.pooled_logits(rows)  # the classifier may need more rows than the last
        else:
            pooled = rows[-1:]
        return _finish(pooled, rule)

    def _accumulate(self, partial: list[Tensor], rule: PoolingRule, rows: Tensor, start: int) -> None:
        """Add rows to the sum, in float64, so that chunks do not change it; or copy them, as the next step overwrites them."""
        if rule.kind == "all":
            partial.append(rows.float().clone())
        elif rule.kind == "classify tokens":
            partial.append(self._decoder.classes.logits(rows))
        elif rule.kind == "first":
            if start == 0:
                partial.append(rows[0].float().clone())
        else:
            total = rows.double().sum(dim=0)
            partial[:] = [total if start == 0 else partial[0] + total]


def _finish(pooled: Tensor, rule: PoolingRule) -> PooledRows:
    """pooled: [R, values]."""
    pooled = pooled[:, : rule.dimensions].double()
    if rule.normalize:
        pooled = torch.nn.functional.normalize(pooled, dim=1)
    if not bool(torch.isfinite(pooled).all()):
        raise NotFiniteError(_NOT_FINITE)
    values = pooled.float().cpu().contiguous().numpy()
    if sys.byteorder == "big":
        values = values.byteswap()
    return PooledRows(values.tobytes(), values.shape[1])
