"""What a backend's draws are told of each live sequence, kept from step to step.

Responsible for turning sample slots into `kernels.Draw`: settings are written once per sequence, a step adds the row, the
uniform number and what its processor has to say. It computes no logits and knows nothing of scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from windlass.engine.api.request import SamplingParams
from windlass.engine.sampling.grammar.mask import Mask
from windlass.engine.sampling.grammar.masks import GrammarMasks
from windlass.engine.sampling.penalties import LogitsProcessor, changes_logits, penalties_of
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.sampling.uniform import exclusion_chance, uniform
from windlass.kernels import Backend, Draw, Filters


def filters_of(sampling: SamplingParams, vocab_size: int) -> Filters:
    """How its rows are narrowed, exclusions of top choices aside, which change from draw to draw."""
    s = sampling
    return Filters(s.temperature, s.min_p, s.top_k if s.top_k < vocab_size else 0, s.top_p, s.typical_p)


@dataclass(slots=True)
class _Prepared:
    """call: the last call that used it, so that two slots of one sequence in one call do not share it."""

    slot: SampleSlot
    draw: Draw
    processor: LogitsProcessor | None
    call: int = -1


class PreparedDraws:
    """Draws from rows of `vocab_size` logits. masks: of the samples that have a grammar."""

    def __init__(self, vocab_size: int, backend: Backend, masks: GrammarMasks | None) -> None:
        self._masks = masks
        self._vocab_size, self._device = vocab_size, backend.device
        self._drawer = backend.drawer(vocab_size)
        self._kept: dict[int, _Prepared] = {}
        self._calls = 0

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._kept.pop(seq_id, None)

    def draw(self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]]) -> list[tuple[int, int]]:
        """(token id, or -1; `DrawStatus`) of each slot; arguments as of `Sampler.sample`, logits float32."""
        self._calls += 1
        draws = []
        for row, slot in slots:
            kept = self._prepared(slot)
            one = kept.draw
            one.row = row
            drawn = len(slot.token_ids) - slot.num_prompt_tokens
            if slot.sampling.temperature > 0:
                one.uniform = uniform(slot.seed, slot.index, drawn)
                if slot.sampling.xtc_probability > 0:
                    excludes = exclusion_chance(slot.seed, slot.index, drawn) < slot.sampling.xtc_probability
                    one.exclude_from = slot.sampling.xtc_threshold if excludes else 1.0
            if kept.processor is None and drawn < slot.sampling.min_tokens:
                kept.processor = LogitsProcessor(slot, self._device)
            if kept.processor is not None:
                one.change(kept.processor.changes(slot, self._mask(slot)))
            draws.append(one)
        self._drawer.draw(logits, draws)
        return [(one.token, one.status) for one in draws]

    def _mask(self, slot: SampleSlot) -> Mask | None:
        if slot.sampling.grammar is None or self._masks is None:
            return None
        return self._masks.mask(slot)

    def _prepared(self, slot: SampleSlot) -> _Prepared:
        kept = self._kept.get(slot.seq_id)
        if kept is not None and kept.call == self._calls:
            return self._prepare(slot)  # another slot of a sequence that this call has met
        if kept is None:
            kept = self._kept[slot.seq_id] = self._prepare(slot)
        elif kept.slot is not slot:
            same = kept.slot.sampling is slot.sampling or kept.slot.sampling == slot.sampling
            if not same or kept.slot.stop_ids != slot.stop_ids:
                kept = self._kept[slot.seq_id] = self._prepare(slot)
            kept.slot = slot
        kept.call = self._calls
        return kept

    def _prepare(self, slot: SampleSlot) -> _Prepared:
        s = slot.sampling
        draw = self._drawer.new(filters_of(s, self._vocab_size), penalties_of(s))
        return _Prepared(slot, draw, LogitsProcessor(slot, self._device) if changes_logits(s) else None)
