"""Model runner: persistent batches equal new ones, and blocks of a plan are moved in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.device import ON_A_CPU
from helpers.engines import greedy, make_core, run, specs_of
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model

from windlass.engine.cache.cache_operations import (
    BlockCopy,
    KeyRerotation,
    LoadedBlock,
    SavedBlock,
    SwappedPages,
    TableChange,
    TableChanges,
)
from windlass.engine.cache.host_tier import CPUBlockTransfer, planes_of
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import SamplingParams
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput, Snapshot


@ON_A_CPU
def test_persistent_batches_equal_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    batches.build = both
    linear = RopeScaling.from_dict({"rope_type": "linear", "factor": 3.0})
    run(core, [greedy("a", range(3, 20), 90), greedy("b", range(5, 9), 12, n=2), greedy("c", range(4, 44), 30)])
    run(core, [greedy("d", range(2, 70), 8, rope_scaling=linear), greedy("e", range(9, 12), 20)])
    widths = {(batch.input_ids.shape[0], batch.block_tables.shape[2]) for batch in seen}
    assert {(1, 8), (2, 4), (2, 8), (4, 4)} <= widths
    same = {id(batch) for batch in seen}
    assert len(same) < len(seen) / 4  # buffers are reused


def test_a_token_without_a_block_is_an_error(tmp_path: Path) -> None:
    core = make_core(make_model("llama", tmp_path))
    tables = TableChanges(True, (TableChange(appended=(-1,) * 4),))
    held = NewSequence(0, 0, SamplingParams(), 0, 5, (), (3, 4, 5, 6, 7), tables, rotary_id=0)
    core.runner.restore(Snapshot(0, sequences=(held,)))
    for persistent in (True, False):
        core.runner.batches.persistent = persistent
        with pytest.raises(IndexError, match="no block"):
            core.runner.batches.build([ScheduledSequence(0, 4, 1, 5)])


class _Pages(CPUBlockTransfer):
    """Records the contents of saved blocks."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(planes_of([core.runner.cache]))
        self.saved: list[int] = []

    def save(self, saved: Sequence[SavedBlock]) -> None:
        self.saved += [self.content(one.block) for one in saved]

    def fill(self, block: int, number: int) -> None:
        for view in self._views[0]:
            view[:, block] = number

    def content(self, block: int) -> int:
        """The value of all of its bytes."""
        (number,) = {int(byte) for plane in self.read_block(0, block, 0.0) for byte in plane.flat}
        return number

    def read(self, number: int) -> int:
        """The handle of a block from a file."""
        planes = tuple(np.full((form.shape[0], form.num_bytes // form.shape[0]), number) for form in self.forms[0])
        ticket = self.stage(0, tuple(plane.astype(np.uint8) for plane in planes), lambda: False)
        assert ticket is not None
        return ticket


@pytest.fixture
def core(tmp_path: Path) -> EngineCore:
    made = make_core(make_model("llama", tmp_path), device="cpu", dtype="float32")
    made.runner._persisted = _Pages(made)
    return made


@torch.inference_mode()
def test_blocks_reused_within_a_plan_are_moved_in_order(core: EngineCore) -> None:
    runner, pages = core.runner, core.runner._persisted
    assert isinstance(pages, _Pages)
    for block in range(9):
        pages.fill(block, 100 + block)
    step = core.scheduler.schedule().step
    runner.apply(
        SchedulerOutput(
            step,
            saved=(SavedBlock(0, b"", 2, 0), SavedBlock(0, b"", 3, 1)),
            swapped_out=(SwappedPages(7, ((3, 4),)), SwappedPages(8, ((1,),))),
            loaded=tuple(LoadedBlock(0, block, pages.read(block)) for block in (2, 3, 5)),
            swapped_in=(SwappedPages(8, ((4,),)),),  # replaces one that was swapped out
            copies=(BlockCopy(0, 3, 6),),
        )
    )
    assert pages.saved == [102, 103]
    assert [pages.content(block) for block in range(7)] == [100, 101, 2, 3, 101, 5, 3]
    runner.apply(
        SchedulerOutput(
            step + 1,
            loaded=(LoadedBlock(0, 5, pages.read(50)),),
            swapped_in=(SwappedPages(7, ((5, 8),)),),  # the loaded one was evicted again
            copies=(BlockCopy(0, 5, 0),),
        )
    )
    assert [pages.content(block) for block in range(9)] == [103, 101, 2, 3, 101, 103, 3, 107, 104]


@pytest.mark.parametrize("most", [40, 16])
@torch.inference_mode()
def test_keys_are_rotated_in_smaller_parts_without_memory(
    core: EngineCore, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planes,), rotator, backend = core.runner.cache.planes, core.runner._rotator, core.runner.decoder.backend
    for plane in planes:
        plane.copy_(torch.randn_like(plane))  # everywhere: unwritten memory may hold NaNs
    before = [plane.clone() for plane in planes]
    (old,) = specs_of(core, greedy("a", [5, 6]))
    new = replace(old, inv_freq=tuple(frequency / 3 for frequency in old.inv_freq))
    turned = KeyRerotation(0, 5, 75, (0, 1, 2, 3, 4), (8, 7, 12, 6, 9), 100, (old,), (new,))
    rotator.apply(turned)
    right = [plane.clone() for plane in planes]
    turn, layers, failed = backend.rerotate_cached_keys, [0], list[int]()

    def fails(pages: Any, sources: torch.Tensor, *operands: Any, **named: Any) -> None:
        layers[0] += 1
        if len(sources) > most and layers[0] % 3 == 0:
            failed.append(len(sources))
            raise torch.OutOfMemoryError(NO_ROOM)
        turn(pages, sources, *operands, **named)

    monkeypatch.setattr(backend, "rerotate_cached_keys", fails)
    for plane, kept in zip(planes, before, strict=True):
        plane.copy_(kept)
    rotator.apply(turned)
    assert failed and all(torch.equal(plane, wanted) for plane, wanted in zip(planes, right, strict=True))
    most = 0
    with pytest.raises(torch.OutOfMemoryError):  # not even enough memory for one block
        rotator.apply(turned)
