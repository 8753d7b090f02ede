"""What the compiled draw is told of each live sequence, kept from step to step.

Responsible for turning sample slots into `kernels.cpu.Draw`: settings are written once per sequence, a step adds the row,
the uniform number and what its processor has to say. It computes no logits and knows nothing of scheduling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.engine.sampling.draw import MIN_TEMPERATURE, uniform
from windlass.engine.sampling.penalties import LogitsProcessor, changes_logits
from windlass.engine.scheduling.plan import SampleSlot
from windlass.kernels import cpu
from windlass.kernels.cpu.sampling import LOWEST, MAX_VOCAB

_CPU = torch.device("cpu")


@dataclass(slots=True)
class _Prepared:
    """call: the last call that used it, so that two slots of one sequence in one call do not share it."""

    slot: SampleSlot
    draw: cpu.Draw
    processor: LogitsProcessor | None
    call: int = -1


class PreparedDraws:
    """Draws for up to `vocab_size` logits a row; see `refusal`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kept: dict[int, _Prepared] = {}
        self._memory: Tensor | None = None
        self._calls = 0

    @staticmethod
    def refusal(vocab_size: int, device: torch.device) -> str | None:
        """Why compiled draws cannot serve these logits, or None when they can."""
        if device.type != "cpu":
            return f"logits are on {device}"
        if vocab_size > MAX_VOCAB:
            return f"a vocabulary of {vocab_size} has sums that float64 rounds"
        return cpu.unavailable_reason()

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._kept.pop(seq_id, None)

    def keep_only(self, seq_ids: Set[int]) -> None:
        """Drop what is kept for every other sequence."""
        self._kept = {seq_id: kept for seq_id, kept in self._kept.items() if seq_id in seq_ids}

    def draw(
        self, logits: Tensor, slots: Sequence[tuple[int, SampleSlot]], masks: Sequence[Tensor | None] | None
    ) -> list[tuple[int, int]]:
        """(token id, or -1; status as in `cpu.Draw`) of each slot; arguments as of `Sampler.sample`, logits float32."""
        self._calls += 1
        alive, draws = [], []  # a draw names memory of its processor
        for i, (row, slot) in enumerate(slots):
            kept = self._prepared(slot)
            alive.append(kept)
            one = kept.draw
            one.row = row
            drawn = len(slot.token_ids) - slot.num_prompt_tokens
            if one.temperature > 0:
                one.uniform = uniform(slot.seed, slot.index, drawn)
            mask = None if masks is None else masks[i]
            if kept.processor is None and (mask is not None or drawn < slot.sampling.min_tokens):
                kept.processor = LogitsProcessor(slot, self._vocab_size, _CPU)
            if kept.processor is not None:
                kept.processor.describe(one, slot, mask)
            draws.append(one)
        cpu.draw_tokens(logits, draws, self._working_memory())
        return [(one.token, one.status) for one in draws]

    def _working_memory(self) -> Tensor:
        if self._memory is None:
            self._memory = cpu.drawing_memory(self._vocab_size, torch.get_num_threads())
        return self._memory

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
        draw = cpu.Draw(
            repetition=1.0,
            temperature=max(s.temperature, MIN_TEMPERATURE) if s.temperature > 0 else 0.0,
            floor=math.log(s.min_p) if s.min_p > 0 else LOWEST,
            top_k=s.top_k if s.top_k < self._vocab_size else 0,
            top_p=s.top_p,
            typical_p=s.typical_p,
        )
        return _Prepared(slot, draw, LogitsProcessor(slot, self._vocab_size, _CPU) if changes_logits(s) else None)
