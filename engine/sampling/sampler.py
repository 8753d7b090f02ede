"""Turns logits into tokens for every sample of a step.

Responsible for the order of things: log-probabilities from the raw logits, masks and penalties, the draw, and for
keeping one request's trouble away from the others. The arithmetic lives in `penalties`, `draw` and `logprobs`; of the
scheduler it knows only `SampleSlot`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.errors import EngineError
from windlass.engine.sampling.draw import Filters, draw, uniform
from windlass.engine.sampling.logprobs import token_logprobs
from windlass.engine.sampling.penalties import LogitsProcessor, changes_logits
from windlass.engine.sampling.prepared_draws import PreparedDraws
from windlass.engine.scheduling.plan import SampleSlot
from windlass.kernels.cpu import Draw

__all__ = ["Drawn", "Sampler", "token_logprobs"]

_BAD_LOGITS = "the model produced NaN or infinite logits for this request"
_NOTHING_LEFT = (
    "no token is left to draw: the allowed ids, the grammar, bad_words, min_tokens and penalties of this request "
    "exclude everything"
)
_ERRORS = {
    Draw.BAD_LOGITS: _BAD_LOGITS,
    Draw.NOTHING_LEFT: _NOTHING_LEFT,
    Draw.NO_SUCH_ID: "this request names a token id outside the vocabulary",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one slot drew. error: set when nothing could be drawn for it; then token_id is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: EngineError | None = None


class Sampler:
    """Keeps the penalty counts and masks of live sequences between steps; call `keep_only` (or `forget`) as they end.

    compiled: False for plain torch even where there are compiled draws, which give the same tokens.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, *, compiled: bool = True) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._processors: dict[int, LogitsProcessor] = {}
        usable = compiled and PreparedDraws.refusal(vocab_size, self._device) is None
        self._prepared = PreparedDraws(vocab_size) if usable else None

    @property
    def num_tracked(self) -> int:
        """Sequences with state held here."""
        return len(self._processors if self._prepared is None else self._prepared)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._processors.pop(seq_id, None)
        if self._prepared is not None:
            self._prepared.forget(seq_id)

    def keep_only(self, seq_ids: Set[int]) -> None:
        """Drop what is kept for every other sequence."""
        self._processors = {seq_id: kept for seq_id, kept in self._processors.items() if seq_id in seq_ids}
        if self._prepared is not None:
            self._prepared.keep_only(seq_ids)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: Sequence[tuple[int, SampleSlot]],
        masks: Sequence[Tensor | None] | None = None,
    ) -> list[Drawn]:
        """Draw one token per slot.

        logits: [R, V] float32, left unchanged. slots: (row of logits, slot); several slots may share a row.
        masks: per slot a bool tensor [V] that is True where a token is allowed, or None.
        A row with NaN or +inf, or one with every token masked, gives a Drawn with an error and touches no other slot.
        """
        if not slots:
            return []
        if logits.shape[1] != self._vocab_size:
            raise ValueError(f"logits have {logits.shape[1]} columns, the vocabulary {self._vocab_size}")
        if logits.dtype != torch.float32:
            logits = logits.float()
        tokens: list[int | None]
        errors: list[str | None]
        if self._prepared is None:
            tokens, errors = self._choose(logits, slots, masks)
        elif all(slot.sampling.temperature <= 0 for _, slot in slots) and not any(
            self._needs_processing(slot, masks, i) for i, (_, slot) in enumerate(slots)
        ):
            best_ids, highest = row_maxima(logits)
            tokens = [best_ids[row] if math.isfinite(highest[row]) else None for row, _ in slots]
            errors = [None] * len(slots)
        else:
            drawn = self._prepared.draw(logits, slots, masks)
            tokens = [token if status == Draw.OK else None for token, status in drawn]
            errors = [_ERRORS.get(status) for _, status in drawn]
        found = self._logprobs(logits, slots, tokens)
        return [
            Drawn(-1, None, EngineError(error or _BAD_LOGITS)) if token is None else Drawn(token, found.get(i))
            for i, (token, error) in enumerate(zip(tokens, errors, strict=True))
        ]

    def _choose(
        self,
        logits: Tensor,
        slots: Sequence[tuple[int, SampleSlot]],
        masks: Sequence[Tensor | None] | None,
    ) -> tuple[list[int | None], list[str | None]]:
        """In plain torch, the tokens, or what kept a slot from one."""
        best_ids, highest = row_maxima(logits)
        healthy_rows = [math.isfinite(value) for value in highest]

        tokens: list[int | None] = [None] * len(slots)
        errors: list[str | None] = [None] * len(slots)
        changed: list[int] = []  # slots whose logits are copied before they are changed or drawn from
        for i, (row, slot) in enumerate(slots):
            if not healthy_rows[row]:
                errors[i] = _BAD_LOGITS
            elif slot.sampling.temperature <= 0 and not self._needs_processing(slot, masks, i):
                tokens[i] = best_ids[row]
            else:
                changed.append(i)
        if changed:
            self._process_and_draw(logits, slots, masks, changed, tokens, errors)
        return tokens, errors

    def _needs_processing(self, slot: SampleSlot, masks: Sequence[Tensor | None] | None, i: int) -> bool:
        too_short = len(slot.token_ids) - slot.num_prompt_tokens < slot.sampling.min_tokens
        has_mask = masks is not None and masks[i] is not None
        return has_mask or too_short or changes_logits(slot.sampling)

    def _process_and_draw(
        self,
        logits: Tensor,
        slots: Sequence[tuple[int, SampleSlot]],
        masks: Sequence[Tensor | None] | None,
        changed: list[int],
        tokens: list[int | None],
        errors: list[str | None],
    ) -> None:
        """Fill `tokens` and `errors` of the slots listed in `changed`."""
        work = logits.index_select(0, torch.tensor([slots[i][0] for i in changed], device=logits.device))  # [S, V]
        for at, i in enumerate(changed):
            slot = slots[i][1]
            if self._needs_processing(slot, masks, i):
                self._processor(slot).apply(work[at], slot, None if masks is None else masks[i])
        # Masks may have left nothing, a penalty may have overflowed: only these rows fail.
        best, highest = row_maxima(work)
        usable = [math.isfinite(value) for value in highest]
        greedy = [at for at, i in enumerate(changed) if usable[at] and slots[i][1].sampling.temperature <= 0]
        drawn = [at for at, i in enumerate(changed) if usable[at] and slots[i][1].sampling.temperature > 0]
        for at in greedy:
            tokens[changed[at]] = best[at]
        if drawn:
            chosen = [slots[changed[at]][1] for at in drawn]
            for at, token in zip(drawn, self._draw(_take(work, drawn), chosen), strict=True):
                tokens[changed[at]] = token
        for at, i in enumerate(changed):
            if not usable[at]:
                errors[i] = _NOTHING_LEFT

    def _draw(self, work: Tensor, slots: Sequence[SampleSlot]) -> list[int]:
        filters, uniforms = [], []
        for slot in slots:
            s = slot.sampling
            top_k = s.top_k if s.top_k < self._vocab_size else 0
            filters.append(Filters(s.temperature, s.min_p, top_k, s.top_p, s.typical_p))
            uniforms.append(uniform(slot.seed, slot.index, len(slot.token_ids) - slot.num_prompt_tokens))
        return draw(work, filters, uniforms)

    def _processor(self, slot: SampleSlot) -> LogitsProcessor:
        kept = self._processors.get(slot.seq_id)
        if kept is None or (kept.sampling is not slot.sampling and kept.sampling != slot.sampling):
            kept = self._processors[slot.seq_id] = LogitsProcessor(slot, self._vocab_size, self._device)
        return kept

    def _logprobs(
        self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]], tokens: Sequence[int | None]
    ) -> dict[int, TokenLogprobs]:
        """Log-probabilities of the drawn tokens where asked for, by slot."""
        asked = [i for i, (_, slot) in enumerate(slots) if slot.sampling.logprobs is not None and tokens[i] is not None]
        if not asked:
            return {}
        widths = [slots[i][1].sampling.logprobs or 0 for i in asked]
        rows = torch.tensor([slots[i][0] for i in asked])
        targets = torch.tensor([tokens[i] or 0 for i in asked])
        found = token_logprobs(logits, targets, max(widths), rows, compiled=self._prepared is not None)
        return {
            i: TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[:width])
            for i, entry, width in zip(asked, found, widths, strict=True)
        }


def row_maxima(logits: Tensor) -> tuple[list[int], list[float]]:
    """The first index of each row's largest value, and that value; a NaN counts as the largest. logits: [R, V] float32."""
    if logits.is_cpu:
        # Numpy's reduction is vectorised where torch's is not: ten times quicker on a vocabulary.
        rows = logits.numpy()
        best = rows.argmax(1)
        return best.tolist(), rows[np.arange(len(rows)), best].tolist()
    largest = logits.max(-1)
    return largest.indices.tolist(), largest.values.tolist()


def _take(work: Tensor, rows: list[int]) -> Tensor:
    return work if len(rows) == len(work) else work[rows]
