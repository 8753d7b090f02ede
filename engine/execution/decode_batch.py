"""The batch of a step in which every sequence computes one token, in the same memory step after step.

Responsible for filling the tensors of such a `ForwardBatch` with few operations and without allocating: between two steps
of the same streams only numbers change. It decides nothing, and what other steps look like is the runner's business.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from windlass.engine.execution.block_rows import BlockRows
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.rotary.tables import RotaryTables, TokenRotations
from windlass.engine.scheduling.plan import ScheduledSequence

_MAX_SHAPES = 4
_FIRST_COLUMNS = 64


class _Memory:
    """The arrays behind one batch of B rows and block tables of `width` columns."""

    def __init__(self, groups: int, rows: int, width: int, rotary: RotaryTables) -> None:
        self.said = np.zeros((4, rows), dtype=np.int64)  # what sequences say: token, start, first position, rotary row
        self.positions, self.lengths, self.block, self.offset = np.zeros((4, rows), dtype=np.int64)
        self.row = np.arange(rows)
        self.slots = np.zeros((groups, rows), dtype=np.int64)
        self.tables = np.full((groups, rows, width), -1, dtype=np.int32)
        ids, _, first, rotary_ids = (torch.from_numpy(row) for row in self.said)
        rotary_groups, _, half = rotary.inv_freq.shape
        shapes = (rotary_groups, rows, half), (rotary_groups, rows, half), (rotary_groups, rows)
        self.rotation = TokenRotations(*(torch.from_numpy(np.zeros(shape, dtype=np.float32)) for shape in shapes))
        self.batch = ForwardBatch(
            input_ids=ids,
            positions=torch.from_numpy(self.positions),
            rotary_ids=rotary_ids,
            slots=torch.from_numpy(self.slots),
            block_tables=torch.from_numpy(self.tables),
            query_start=torch.arange(rows + 1),
            seq_lens=torch.from_numpy(self.lengths),
            first_position=first,
            **self.rotation._asdict(),
            score_scale=torch.from_numpy(np.ones(rows, dtype=np.float32)),
            lasting=True,
        )


class DecodeBatches:
    """num_groups: KV groups. For backends that read host memory. A batch is overwritten by the next one of as many rows."""

    def __init__(self, num_groups: int, block_size: int, block_rows: BlockRows, rotary: RotaryTables) -> None:
        self._groups, self._block_size = num_groups, block_size
        self._block_rows, self._rotary = block_rows, rotary
        self._memory: OrderedDict[tuple[int, int], _Memory] = OrderedDict()  # by rows and width

    def build(self, sequences: list[ScheduledSequence]) -> ForwardBatch:
        """The batch of sequences of one token each, in order."""
        said = np.array(
            [(s.token_ids[s.start], s.start, s.first_position, s.rotary_id) for s in sequences], dtype=np.int64
        )
        blocks = -(-(int(said[:, 1].max()) + 1) // self._block_size)
        memory = self._memory_for(len(sequences), blocks)
        memory.said[...] = said.T
        _, starts, first, _ = memory.said
        np.add(starts, first, out=memory.positions)
        np.add(starts, 1, out=memory.lengths)
        memory.tables[:, :, :blocks] = self._block_rows.tables(sequences, blocks)
        np.divmod(starts, self._block_size, out=(memory.block, memory.offset))
        np.multiply(memory.tables[:, memory.row, memory.block], np.int64(self._block_size), out=memory.slots)
        if memory.slots.min() < 0:
            raise AssertionError("a scheduled token has no block to go to")
        memory.slots += memory.offset
        batch = memory.batch
        self._rotary.write_cos_sin(batch.rotary_ids, batch.positions, memory.rotation)
        return batch

    def _memory_for(self, rows: int, blocks: int) -> _Memory:
        width = max(_FIRST_COLUMNS, 1 << (blocks - 1).bit_length())
        found = self._memory.get((rows, width))
        if found is None:
            found = self._memory[rows, width] = _Memory(self._groups, rows, width, self._rotary)
            while len(self._memory) > _MAX_SHAPES:
                self._memory.popitem(last=False)
        else:
            self._memory.move_to_end((rows, width))
        return found
