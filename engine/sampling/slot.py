"""What the sampler is told of one sample: its settings and its tokens so far. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.engine.api.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSlot:
    """One sample drawn from a row of logits.

    `token_ids` is the sequence's prompt followed by its output so far, a list that grows as the sequence does;
    `num_prompt_tokens` splits them. `stop_ids` are the ids that `sampling.min_tokens` keeps masked (eos unless ignored,
    and stop ids).
    """

    seq_id: int
    index: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    token_ids: Sequence[int]
    stop_ids: tuple[int, ...] = ()
