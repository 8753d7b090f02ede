"""Whose states the tokens of a step change: states go by sequences, whatever the pieces of them that attend on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from windlass.engine.execution.sequences import LiveSequences
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.scheduling.plan import ScheduledSequence
from windlass.kernels import sent


def with_states(batch: ForwardBatch, items: Sequence[ScheduledSequence], sequences: LiveSequences) -> ForwardBatch:
    """The batch of these chunks, in order, with its states."""
    held = [sequences.by_id[item.seq_id] for item in items]
    counts = torch.tensor([item.num_tokens for item in items])
    firsts = torch.tensor([item.start for item in items])
    blocks = torch.from_numpy(sequences.states([live.row for live in held]))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    device = batch.input_ids.device
    return replace(
        batch,
        state_blocks=sent(blocks, device),
        state_starts=sent(starts, device),
        state_lengths=sent(firsts + counts, device),
    )
