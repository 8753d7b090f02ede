"""Batches in persistent buffers equal newly allocated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run
from helpers.tiny_models import make_model

from windlass.engine.cache.cache_operations import TableChange, TableChanges
from windlass.engine.interface.request import SamplingParams
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import NewSequence, ScheduledSequence, Snapshot


@ON_A_CPU
def test_lasting_batches_equal_fresh_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV groups, one with a window that drops blocks; streams start, end and outgrow the first table width."""
    monkeypatch.setattr("windlass.engine.execution.input_batch._FIRST_COLUMNS", 4)
    core = make_core(make_model("gemma3", tmp_path), max_model_len=256)
    batches = core.runner.batches
    build = batches.build
    assert batches.persistent
    seen: list[ForwardBatch] = []

    def both(sequences: Sequence[ScheduledSequence]) -> ForwardBatch:
        batch = build(sequences)
        if not batch.persistent:
            return batch
        found = {
            f.name: getattr(batch, f.name) for f in fields(batch) if f.name not in ("persistent", "only_last_tokens")
        }
        kept = {name: tensor.clone() for name, tensor in found.items() if tensor is not None}
        batches.persistent = False
        fresh = build(sequences)
        batches.persistent = True
        assert not fresh.persistent
        for name, tensor in kept.items():
            want = getattr(fresh, name)
            if name == "block_tables":  # entries past a sequence's last block are undefined
                for row, length in enumerate(batch.seq_lens.tolist()):
                    blocks = -(-length // 16)
                    assert torch.equal(tensor[:, row, :blocks], want[:, row, :blocks])
            else:
                assert torch.equal(tensor, want) and tensor.dtype == want.dtype, name
        seen.append(batch)
        return batch

    batches.build = both  # type: ignore[method-assign]
    linear = RopeScaling.from_dict({"rope_type": "linear", "factor": 3.0})
    run(core, [greedy("a", range(3, 20), 90), greedy("b", range(5, 9), 12, n=2), greedy("c", range(4, 44), 30)])
    run(core, [greedy("d", range(2, 70), 8, rope_scaling=linear), greedy("e", range(9, 12), 20)])
    widths = {(batch.input_ids.shape[0], batch.block_tables.shape[2]) for batch in seen}
    assert {(1, 8), (2, 4), (2, 8), (4, 4)} <= widths
    same = {id(batch) for batch in seen}
    assert len(same) < len(seen) / 4  # buffers are reused


def test_a_token_without_a_block_is_noticed(tmp_path: Path) -> None:
    core = make_core(make_model("llama", tmp_path))
    tables = TableChanges(True, (TableChange(appended=(-1,) * 4),))
    held = NewSequence(0, 0, SamplingParams(), 0, 5, (), (3, 4, 5, 6, 7), tables, rotary_id=0)
    core.runner.restore(Snapshot(0, sequences=(held,)))
    for persistent in (True, False):
        core.runner.batches.persistent = persistent
        with pytest.raises(IndexError, match="no block"):
            core.runner.batches.build([ScheduledSequence(0, 4, 1, 5)])
