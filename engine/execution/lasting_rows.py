"""The memory of a batch of single tokens, which stands from step to step and is filled in place. Knows no sequence."""

from __future__ import annotations

import numpy as np
import torch

from windlass.engine.model.batch import ForwardBatch
from windlass.engine.rotary.tables import RotaryTables
from windlass.kernels import Backend, StepRows


class LastingRows:
    """The arrays behind one batch of B rows and block tables of `width` columns. has_states: whether layers carry states."""

    def __init__(
        self,
        groups: int,
        rows: int,
        width: int,
        rotary: RotaryTables,
        block_size: int,
        backend: Backend,
        *,
        has_states: bool,
    ) -> None:
        rotary_groups, _, half = rotary.inv_freq.shape
        self.rows = StepRows.zeros(groups, rows, width, rotary_groups, half)
        self.fill = backend.rows_filler(self.rows, rotary.inv_freq, rotary.q_scale, rotary.score_scale, block_size)
        ids, _, _, rotary_ids, _ = (torch.from_numpy(row) for row in self.rows.said)
        positions, lengths = torch.from_numpy(self.rows.positions), torch.from_numpy(self.rows.lengths)
        starts = torch.arange(rows + 1)
        self.states, self.state_lengths = np.zeros((2, rows if has_states else 0), dtype=np.int64)
        self.batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            rotary_ids=rotary_ids,
            slots=torch.from_numpy(self.rows.slots),
            block_tables=torch.from_numpy(self.rows.tables),
            query_start=starts,
            seq_lens=lengths,
            context_positions=positions,
            cos=self.rows.cos,
            sin=self.rows.sin,
            q_scale=self.rows.q_scale,
            score_scale=self.rows.score_scale,
            lasting=True,
            state_blocks=torch.from_numpy(self.states) if has_states else None,
            state_starts=starts if has_states else None,
            state_lengths=torch.from_numpy(self.state_lengths) if has_states else None,
        )
        self.adapter_slots = torch.full((rows,), -1)
