"""What a backend's draws are told of each live sequence, kept from step to step.

Responsible for turning sample slots into `kernels.SamplingRow`: settings are written once per sequence, a step adds the row, the
uniform number and what its processor has to say. It computes no logits and knows nothing of scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from windlass.engine.api.request import SamplingParams
from windlass.engine.sampling.grammar.mask import GrammarMask
from windlass.engine.sampling.grammar.masks import GrammarMasks
from windlass.engine.sampling.penalties import LogitsProcessor, changes_logits, penalties_of
from windlass.engine.sampling.slot import SampleSlot
from windlass.engine.sampling.uniform import uniform, xtc_uniform
from windlass.kernels import Backend, Filters, SamplingRow


def filters_of(sampling: SamplingParams, vocab_size: int) -> Filters:
    """How its rows are narrowed, exclusions of top choices aside, which change from draw to draw."""
    s = sampling
    return Filters(s.temperature, s.min_p, s.top_k if s.top_k < vocab_size else 0, s.top_p, s.typical_p)


@dataclass(slots=True)
class _SequenceSampling:
    """call: the last call that used it, so that two slots of one sequence in one call do not share it."""

    slot: SampleSlot
    draw: SamplingRow
    processor: LogitsProcessor | None
    call: int = -1


class SamplingState:
    """Draws from rows of `vocab_size` logits. masks: of the samples that have a grammar."""

    def __init__(self, vocab_size: int, backend: Backend, masks: GrammarMasks | None) -> None:
        self._masks = masks
        self._vocab_size, self._device = vocab_size, backend.device
        self._drawer = backend.token_sampler(vocab_size)
        self._entries: dict[int, _SequenceSampling] = {}
        self._calls = 0

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._entries.pop(seq_id, None)

    def sample(self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]]) -> list[tuple[int, int]]:
        """(token id, or -1; `SamplingStatus`) of each slot; arguments as of `Sampler.sample`, logits float32."""
        self._calls += 1
        draws = []
        for row, slot in slots:
            entry = self._sampling_state(slot)
            one = entry.draw
            one.row = row
            drawn = len(slot.token_ids) - slot.num_prompt_tokens
            if slot.sampling.temperature > 0:
                one.uniform = uniform(slot.seed, slot.index, drawn)
                if slot.sampling.xtc_probability > 0:
                    excludes = xtc_uniform(slot.seed, slot.index, drawn) < slot.sampling.xtc_probability
                    one.exclude_from = slot.sampling.xtc_threshold if excludes else 1.0
            if entry.processor is None and drawn < slot.sampling.min_tokens:
                entry.processor = LogitsProcessor(slot, self._device)
            if entry.processor is not None:
                one.change(entry.processor.changes(slot, self._mask(slot)))
            draws.append(one)
        self._drawer.sample(logits, draws)
        return [(one.token, one.status) for one in draws]

    def _mask(self, slot: SampleSlot) -> GrammarMask | None:
        if slot.sampling.grammar is None or self._masks is None:
            return None
        return self._masks.mask(slot)

    def _sampling_state(self, slot: SampleSlot) -> _SequenceSampling:
        entry = self._entries.get(slot.seq_id)
        if entry is not None and entry.call == self._calls:
            return self._prepare(slot)  # another slot of a sequence that this call has met
        if entry is None:
            entry = self._entries[slot.seq_id] = self._prepare(slot)
        elif entry.slot is not slot:
            same = entry.slot.sampling is slot.sampling or entry.slot.sampling == slot.sampling
            if not same or entry.slot.stop_ids != slot.stop_ids:
                entry = self._entries[slot.seq_id] = self._prepare(slot)
            entry.slot = slot
        entry.call = self._calls
        return entry

    def _prepare(self, slot: SampleSlot) -> _SequenceSampling:
        s = slot.sampling
        draw = self._drawer.new(filters_of(s, self._vocab_size), penalties_of(s))
        return _SequenceSampling(slot, draw, LogitsProcessor(slot, self._device) if changes_logits(s) else None)
