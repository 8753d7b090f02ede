"""Whose states the tokens of a step change: states go by sequences, whatever the pieces of them that attend on their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windlass.engine.execution.sequences import InputBatch
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.scheduling.plan import ScheduledSequence
from windlass.kernels import to_device


class StateRowArrays(NamedTuple):
    """The arrays of a `StateRows`, filled in place. Where there is room for more sequences than a step has, those behind them
    have no tokens."""

    blocks: NDArray[np.int64]  # [S]
    starts: NDArray[np.int64]  # [S + 1]
    lengths: NDArray[np.int64]  # [S]
    kept: NDArray[np.int64]  # [T]

    @classmethod
    def zeros(cls, sequences: int, tokens: int) -> StateRowArrays:
        return cls(*(np.zeros(size, dtype=np.int64) for size in (sequences, sequences + 1, sequences, tokens)))

    def fill(self, items: Sequence[ScheduledSequence], sequences: InputBatch) -> None:
        """Those of these chunks, in order. The state behind every token before a proposed one is kept."""
        count, held = len(items), [sequences.by_id[item.seq_id] for item in items]
        self.blocks[:count] = sequences.state_blocks([live.row for live in held])
        self.starts[1 : count + 1] = np.cumsum([item.num_tokens for item in items])
        self.starts[count + 1 :] = self.starts[count]
        self.lengths[:count] = [item.start + item.num_tokens for item in items]
        self.kept.fill(-1)
        for item, live, first in zip(items, held, self.starts.tolist(), strict=False):
            kept = sequences.draft_state_blocks(live)
            if kept.size:
                # A draft model has a chunk for each token: from the one on whose state is kept in that place. What was set aside
                # in front of a step planned ahead stands behind no token of that step.
                ahead = item.start + 1 - item.num_known_tokens
                begin, end = max(0, -ahead), min(item.num_tokens, kept.size - ahead)
                self.kept[first + begin : first + end] = kept[begin + ahead : end + ahead]

    def tensors(self) -> dict[str, Any]:
        """The same memory, by the names of a batch."""
        return {f"state_{name}": torch.from_numpy(array) for name, array in self._asdict().items()}


def with_state_rows(
    batch: ForwardBatch, items: Sequence[ScheduledSequence], sequences: InputBatch, *, repeatable: bool
) -> ForwardBatch:
    """The batch of these chunks, in order, with its states.

    repeatable: whether steps of single tokens are recorded: all those of as many tokens have arrays of the same shapes then,
    whichever tokens are proposed.
    """
    tokens, attending = batch.input_ids.shape[0], batch.seq_lens.shape[0]
    one_shape = repeatable and attending == tokens
    numbers = StateRowArrays.zeros(tokens if one_shape else len(items), tokens)
    numbers.fill(items, sequences)
    fields: dict[str, Any] = {
        name: to_device(tensor, batch.input_ids.device) for name, tensor in numbers.tensors().items()
    }
    if not one_shape and not any(sequences.draft_state_blocks(sequences.by_id[item.seq_id]).size for item in items):
        fields["state_snapshots"] = None
    return replace(batch, **fields)
