"""The memory of a batch of single tokens, which stands from step to step and is filled in place. Knows no sequence."""

from __future__ import annotations

import torch

from windlass.engine.execution.state_rows import StateRowArrays
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.rotary.tables import RotaryTables
from windlass.kernels import Backend, PersistentBuffers


class PersistentBatch:
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
        self.rows = PersistentBuffers.zeros(groups, rows, width, rotary_groups, half)
        self.fill = backend.buffer_filler(self.rows, rotary.inv_freq, rotary.q_scale, rotary.score_scale, block_size)
        ids, _, _, rotary_ids, _ = (torch.from_numpy(row) for row in self.rows.metadata)
        positions, lengths = torch.from_numpy(self.rows.positions), torch.from_numpy(self.rows.lengths)
        self.states = StateRowArrays.zeros(rows, rows) if has_states else None
        self.batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            rotary_ids=rotary_ids,
            slots=torch.from_numpy(self.rows.slots),
            block_tables=torch.from_numpy(self.rows.tables),
            query_start=torch.arange(rows + 1),
            seq_lens=lengths,
            context_positions=positions,
            cos=self.rows.cos,
            sin=self.rows.sin,
            q_scale=self.rows.q_scale,
            score_scale=self.rows.score_scale,
            persistent=True,
            **({} if self.states is None else self.states.tensors()),
        )
        self.adapter_slots = torch.full((rows,), -1)
